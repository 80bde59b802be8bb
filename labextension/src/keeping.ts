/** What a person does to keep snapshots in order: notes, tags, import, and removing several at once. Loaded when first wanted. */

import { Dialog, Notification, showDialog } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import { ApiError, asError } from './api';
import { DescriptionBody, ImportBody, RemovalBody, TrustBody } from './bodies';
import type { Follower } from './follow';
import { size } from './format';
import type { Model } from './model';
import type { ILook, ISnapshot } from './types';

/** How much of a file is sent at first to see what it is, in bytes: most say so within that. */
const HEAD = 256 * 1024;

export class Keeping {
  constructor(
    private readonly model: Model,
    private readonly follower: Follower,
    private readonly trans: TranslationBundle
  ) {}

  /** Ask for another note and other tags of a snapshot, and give it these. */
  async describe({ name, label, message, tags }: ISnapshot): Promise<void> {
    const { model, follower, trans } = this;
    const asked = await showDialog({
      title: trans.__('Note and tags of %1', label),
      body: new DescriptionBody(message, tags, trans),
      buttons: [Dialog.cancelButton({ label: trans.__('Cancel') }), Dialog.okButton({ label: trans.__('Change') })],
      focusNodeSelector: 'input'
    });
    const changes = asked.value;
    if (asked.button.accept && changes !== null && Object.keys(changes).length > 0) {
      await this._change(async () => {
        await model.api.describe(name, changes);
        const before = {
          ...(changes.message === undefined ? {} : { message }),
          ...(changes.tags === undefined ? {} : { tags })
        };
        follower.tell(
          trans.__('Changed what is said of %1.', label),
          () => void this._change(() => model.api.describe(name, before))
        );
      });
    }
  }

  /** Say what removing several snapshots would free and which of them stay, ask, and do it; tell whether it was done. */
  async removeAll(names: readonly string[]): Promise<boolean> {
    const { model, follower, trans } = this;
    let done = false;
    await this._change(async () => {
      const { would_remove: going = [], freed, errors } = await model.api.removeAll(names, true);
      const labels = new Map(model.snapshots.map(snapshot => [snapshot.name, snapshot.label]));
      const labelled = (name: string): string => labels.get(name) ?? name;
      const staying = names.filter(name => !going.includes(name)).map(labelled);
      const [error] = errors;
      if (going.length === 0) {
        throw new ApiError({
          kind: 'NothingToRemove',
          what: trans.__('None of these snapshots can be removed.'),
          why: errors.map(({ what, why }) => `${what} ${why}`).join(' '),
          then: error?.then ?? ''
        });
      }
      const asked = await showDialog({
        title: trans._n('Remove %1 snapshot?', 'Remove %1 snapshots?', going.length),
        body: new RemovalBody(going.map(labelled), staying, size(freed), trans),
        buttons: [Dialog.cancelButton({ label: trans.__('Cancel') }), Dialog.warnButton({ label: trans.__('Remove') })],
        defaultButton: 0
      });
      if (!asked.button.accept) {
        return;
      }
      const { removed = [], freed: was, errors: failed } = await model.api.removeAll(going, false);
      done = true;
      follower.tell(
        trans._n('Removed %1 snapshot: %2 freed.', 'Removed %1 snapshots: %2 freed.', removed.length, size(was))
      );
      failed.forEach(one => follower.complain(new ApiError(one)));
    });
    return done;
  }

  /** Ask for a file, judge it by how it begins, and bring the snapshot in that it holds. */
  async import(): Promise<void> {
    const { model, follower, trans } = this;
    const asked = await showDialog({
      title: trans.__('Import a snapshot'),
      body: new ImportBody(trans),
      buttons: [Dialog.cancelButton({ label: trans.__('Cancel') }), Dialog.okButton({ label: trans.__('Import') })],
      focusNodeSelector: 'input'
    });
    const { file, replace } = asked.value ?? { file: null, replace: false };
    if (!asked.button.accept || file === null) {
      return;
    }
    await this._change(async () => {
      const found = await this._trusted(file);
      if (found === null) {
        return;
      }
      const label = found.snapshot?.label ?? file.name;
      if (found.here) {
        follower.tell(trans.__('%1 is here already.', label));
      } else if (found.taken && !replace) {
        throw new ApiError({
          kind: 'NameTaken',
          what: trans.__('A snapshot named %1 exists already.', label),
          why: trans.__('A snapshot is never overwritten unless that is asked for.'),
          then: trans.__('Rename that one, or import the file again with “Replace another snapshot” ticked.')
        });
      } else if (await this._send(file, label, replace)) {
        follower.tell(trans.__('Imported %1.', label));
      }
    });
    model.refresh();
  }

  /** Return what a file is; where a stranger signed it, after asking whether to trust them. Null where they are not. */
  private async _trusted(file: File): Promise<ILook | null> {
    const { model, trans } = this;
    try {
      return await this._look(file);
    } catch (reason) {
      const { kind, data } = asError(reason);
      if (kind !== 'UnknownKey' || typeof data?.key !== 'string') {
        throw reason;
      }
      const asked = await showDialog({
        title: trans.__('Trust the maker of this snapshot?'),
        body: new TrustBody(data.key, trans),
        buttons: [
          Dialog.cancelButton({ label: trans.__('Cancel') }),
          Dialog.warnButton({ label: trans.__('Trust and import') })
        ],
        defaultButton: 0,
        focusNodeSelector: '.jp-mod-reject'
      });
      if (!asked.button.accept) {
        return null;
      }
      await model.api.trust(data.key, asked.value ?? '');
      return this._look(file);
    }
  }

  private async _look(file: File): Promise<ILook> {
    for (let bytes = HEAD; ;) {
      const found = await this.model.api.lookAt(file.slice(0, bytes), file.size);
      if (found.snapshot !== null) {
        return found;
      }
      bytes = found.needs;
    }
  }

  /** Send a file, and show how much of it has gone; tell whether all of it has. */
  private async _send(file: File, label: string, replace: boolean): Promise<boolean> {
    const { model, trans } = this;
    const cancelled = new AbortController();
    const text = (percent: number): string =>
      percent < 100
        ? trans.__('Importing %1: %2 % of %3', label, percent, size(file.size))
        : trans.__('Importing %1: writing', label);
    const id = Notification.emit(text(0), 'in-progress', {
      autoClose: false,
      actions: [{ label: trans.__('Cancel'), callback: () => cancelled.abort() }]
    });
    let shown = 0;
    const sent = (bytes: number): void => {
      const percent = Math.min(100, Math.floor((100 * bytes) / Math.max(1, file.size)));
      if (percent !== shown) {
        shown = percent;
        Notification.update({ id, message: text(percent) });
      }
    };
    try {
      await model.api.import(file, replace, sent, cancelled.signal);
      return true;
    } catch (reason) {
      if (cancelled.signal.aborted) {
        Notification.info(trans.__('Cancelled; nothing was imported.'), { autoClose: 5000 });
        return false;
      }
      throw reason;
    } finally {
      // A moment later: a change of its text that is still under way would bring it back.
      window.setTimeout(() => Notification.dismiss(id), 0);
    }
  }

  /** Change something about the snapshots, and look at them anew. */
  private async _change(change: () => Promise<unknown>): Promise<void> {
    try {
      await change();
    } catch (reason) {
      this.follower.complain(reason);
    }
    this.model.refresh();
  }
}
