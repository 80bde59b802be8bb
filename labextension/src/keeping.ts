/** What a person does to keep snapshots in order: notes, tags, import, and removing several at once. Loaded when first wanted. */

import { Dialog, Notification, showDialog } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import { ApiError, asError, type IAdmission } from './api';
import { DescriptionBody, ImportBody, ParagraphsBody, PassphraseBody, RemovalBody, TrustBody } from './bodies';
import type { Follower } from './follow';
import { moment, size } from './format';
import type { Model } from './model';
import { tellInPassing } from './passing';
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
        follower.tell(trans.__('Changed %1.', label), () => void this._change(() => model.api.describe(name, before)));
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
      const how = { passphrase: '', older: false };
      const found = await this._admitted(file, how);
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
          why: trans.__('Snapshots are only overwritten on request.'),
          then: trans.__('Rename that one, or import the file again with “Replace another snapshot” ticked.')
        });
      } else if (await this._send(file, label, { ...how, replace })) {
        follower.tell(trans.__('Imported %1.', label));
      }
    });
    model.refresh();
  }

  /** Return what a file is, after asking for all that it takes to bring it in; null where that is not given. */
  private async _admitted(file: File, how: IAdmission): Promise<ILook | null> {
    for (;;) {
      try {
        return await this._look(file, how);
      } catch (reason) {
        if (!(await this._admit(file, how, reason))) {
          return null;
        }
      }
    }
  }

  /** Ask for what a file was refused for, and tell whether it was given; throw it again where nothing helps. */
  private async _admit(file: File, how: IAdmission, reason: unknown): Promise<boolean> {
    const { model, trans } = this;
    const { kind, data = {} } = asError(reason);
    const cancel = Dialog.cancelButton({ label: trans.__('Cancel') });
    if (kind === 'Sealed' && data.passphrase === true) {
      const asked = await showDialog({
        title: trans.__('Open the encrypted file'),
        body: new PassphraseBody(file.name, how.passphrase !== '', trans),
        buttons: [cancel, Dialog.okButton({ label: trans.__('Open') })],
        focusNodeSelector: 'input'
      });
      how.passphrase = asked.value ?? '';
      return asked.button.accept;
    }
    if (kind === 'UnknownKey' && typeof data.key === 'string') {
      const asked = await showDialog({
        title: trans.__('Trust the signer of this snapshot?'),
        body: new TrustBody(data.key, trans),
        buttons: [cancel, Dialog.warnButton({ label: trans.__('Trust and import') })],
        defaultButton: 0,
        focusNodeSelector: '.jp-mod-reject'
      });
      if (asked.button.accept) {
        await model.api.trust(data.key, asked.value ?? '');
      }
      return asked.button.accept;
    }
    if (kind === 'Replayed' && !how.older) {
      const asked = await showDialog({
        title: trans.__('Import an older snapshot?'),
        body: new ParagraphsBody([
          trans.__(
            '%1 is of %2. Another of that name and maker, of %3, was here before.',
            String(data.name),
            moment(String(data.created)),
            moment(String(data.newest))
          ),
          trans.__('If you did not expect that, somebody may be passing off an old state as new.')
        ]),
        buttons: [cancel, Dialog.warnButton({ label: trans.__('Import the older one') })],
        defaultButton: 0
      });
      how.older = asked.button.accept;
      return how.older;
    }
    throw reason;
  }

  private async _look(file: File, how: IAdmission): Promise<ILook> {
    for (let bytes = HEAD; ;) {
      const found = await this.model.api.lookAt(file.slice(0, bytes), file.size, how);
      if (found.snapshot !== null) {
        return found;
      }
      bytes = found.needs;
    }
  }

  /** Send a file, and show how much of it has gone; tell whether all of it has. */
  private async _send(file: File, label: string, how: IAdmission & { replace: boolean }): Promise<boolean> {
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
      await model.api.import(file, how, sent, cancelled.signal);
      return true;
    } catch (reason) {
      if (cancelled.signal.aborted) {
        tellInPassing(trans.__('Cancelled; nothing was imported.'), 'info');
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
