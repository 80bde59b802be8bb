/** What a person can do with kernels and snapshots, with the questions that come before. Loaded when first wanted. */

import { Clipboard, Dialog, Notification, showDialog } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { Widget } from '@lumino/widgets';
import {
  AddressBody,
  ChecksBody,
  CommandsBody,
  element,
  ErrorBody,
  LogsBody,
  NameBody,
  ParagraphsBody,
  SaveBody
} from './bodies';
import { CompareBody } from './compare';
import { ApiError } from './api';
import { isHibernated, isOf } from './arrange';
import type { Follower } from './follow';
import { ago, size } from './format';
import { Keeping } from './keeping';
import type { Model } from './model';
import { nameOf, suggest } from './names';
import { kernelText } from './sleeping';
import { savesItself, type Step } from './steps';
import type { IError, IKernel, ILog, INotebook, ISnapshot } from './types';
import { sinceText, unsavedText } from './unsaved';

/** How often, and after how many milliseconds again, it is looked whether a dead kernel's last snapshot is written. */
const LOOKS = 120;
const BETWEEN_LOOKS = 500;

/** A notebook that is open, and ways to make another of it. */
export interface INotebooks {
  /** Write a copy of the notebook with what is not saved yet, run by another kernel, open it, and give its path. */
  copyOnto(path: string, kernelId: string): Promise<string>;
  /** Open a notebook, or show it where it is open. */
  open(path: string): Promise<unknown>;
  /** Have a notebook that is open run by another kernel, which this server holds; the one that it had ends. */
  changeKernel(path: string, kernelId: string): Promise<unknown>;
  /** End a kernel that no notebook has. */
  shutDown(kernelId: string): Promise<void>;
}

export class Actions {
  /** Where a snapshot was sent to last. */
  private _address = '';
  readonly keeping: Keeping;

  constructor(
    private readonly model: Model,
    private readonly follower: Follower,
    private readonly notebooks: INotebooks,
    private readonly trans: TranslationBundle
  ) {
    this.keeping = new Keeping(model, follower, trans);
  }

  /** Ask for a name, and save the kernel of the notebook under it; give what requests call it where that was done. */
  async save(): Promise<string | null> {
    const { model, trans } = this;
    const kernelId = model.notebook?.kernelId;
    if (!kernelId) {
      return null;
    }
    const taken = this._names(snapshot => isOf(snapshot, model.notebook));
    const body = new SaveBody(
      suggest(model.notebook?.path ?? '', this._names()),
      taken,
      model.preferences.includePackages,
      trans
    );
    const asked = await this._ask(trans.__('Save the kernel'), body, trans.__('Save'));
    if (asked === null) {
      return null;
    }
    const done = await this.follower.run(() => model.api.operate('save', kernelId, asked));
    return done?.state === 'done' ? done.name : null;
  }

  /** Ask whether to put the kernel of the notebook back to a snapshot, and do it. */
  async restore(snapshot: ISnapshot): Promise<void> {
    const { model, trans } = this;
    const kernelId = model.notebook?.kernelId;
    if (!kernelId) {
      return;
    }
    const { name, label, created } = snapshot;
    const whose = snapshot.notebook
      ? trans.__('It does not belong to this notebook: it was saved from %1.', snapshot.notebook)
      : trans.__('It does not belong to this notebook: it was saved from a kernel without a notebook.');
    await model.refreshed();
    const saveFirst = Dialog.createButton({ label: trans.__('Save first…'), actions: ['save'] });
    const asked = await showDialog({
      title: trans.__('Restore %1?', label),
      body: new ParagraphsBody([
        isOf(snapshot, model.notebook) ? '' : whose,
        trans.__(
          'The kernel goes back to where it was when %1 was saved (%2).',
          label,
          sinceText(created, new Date(), trans)
        ),
        ...unsavedText(model.kernel?.unsaved ?? null, new Date(), trans),
        trans.__(
          'Variables, threads and GPU memory go back to what they were. Cells, outputs and files stay as they are.'
        )
      ]),
      buttons: [
        Dialog.cancelButton({ label: trans.__('Cancel') }),
        saveFirst,
        Dialog.warnButton({ label: trans.__('Restore') })
      ],
      defaultButton: 0
    });
    if (!asked.button.accept) {
      return;
    }
    let undo: (() => void) | undefined;
    if (asked.button.actions.includes('save')) {
      const before = await this.save();
      if (before === null) {
        return;
      }
      undo = () => void this.follower.run(() => model.api.operate('restore', kernelId, { from: before }));
    }
    await this.follower.run(() => model.api.operate('restore', kernelId, { from: name }), undo);
  }

  /** Put the notebook's kernel back to its state before the last cell, or forward again; each offers the other. */
  async step(step: Step): Promise<void> {
    const kernelId = this.model.notebook?.kernelId;
    if (kernelId) {
      await this._step(step, kernelId);
    }
  }

  private async _step(step: Step, kernelId: string): Promise<void> {
    const back = (): void => void this._step(step === 'undo' ? 'redo' : 'undo', kernelId);
    await this.follower.run(() => this.model.api.operate(step, kernelId, {}), back);
  }

  /** Say what to type to bring the job back that a snapshot was saved from: a page holds no jobs. */
  async restoreJob({ name, label, job }: ISnapshot): Promise<void> {
    const { trans } = this;
    const back = `jupyter gpuckpt restore ${job} ${nameOf(name)}`;
    await this._show(
      trans.__('Restore %1 as a job', label),
      new CommandsBody(
        trans.__('It was saved from the job %1: a command that runs without a notebook. In a terminal, type', job),
        [
          {
            command: back,
            does: trans.__('to put %1 back. If it still runs, everything computed since then will be lost.', job)
          },
          {
            command: `${back} --as ${suggest(job, new Set([`${job}-1`]))}`,
            does: trans.__('to start it as a new job under another name.')
          }
        ],
        trans
      )
    );
  }

  /** Ask for another name of a snapshot, and give it that. */
  async rename({ name, label, notebook }: ISnapshot): Promise<void> {
    const { model, trans } = this;
    const before = nameOf(name);
    const body = new NameBody(
      before,
      this._names(snapshot => snapshot.notebook === notebook),
      trans
    );
    const wanted = await this._ask(trans.__('Rename %1', label), body, trans.__('Rename'));
    if (wanted !== null && wanted !== before) {
      await this._change(async () => {
        const renamed = await model.api.rename(name, wanted);
        const back = (): void => void this._change(() => model.api.rename(renamed.name, before));
        this.follower.tell(trans.__('%1 is now %2.', label, wanted), back);
      });
    }
  }

  /** Have a snapshot kept from being removed or replaced, or no longer. */
  async pin({ name, pinned }: ISnapshot): Promise<void> {
    await this._change(() => this.model.api.pin(name, !pinned));
  }

  /** Ask whether to remove a snapshot, and do it. */
  async remove(snapshot: ISnapshot): Promise<void> {
    const { model, trans } = this;
    const { name, label, pinned } = snapshot;
    const remove = pinned ? trans.__('Unpin and remove') : trans.__('Remove');
    const asked = await showDialog({
      title: trans.__('Remove %1?', label),
      body: new ParagraphsBody([
        pinned ? trans.__('It is pinned: somebody wants it kept.') : '',
        trans.__('The snapshot (%1) will be permanently removed.', size(snapshot.size))
      ]),
      buttons: [Dialog.cancelButton({ label: trans.__('Cancel') }), Dialog.warnButton({ label: remove })],
      defaultButton: 0
    });
    if (asked.button.accept) {
      await this._change(async () => {
        if (pinned) {
          await model.api.pin(name, false);
        }
        const { freed } = await model.api.remove(name);
        this.follower.tell(trans.__('Removed %1: %2 freed.', label, size(freed)));
      });
    }
  }

  /** Show what differs between a snapshot and another, which is chosen there. */
  async compare(snapshot: ISnapshot): Promise<void> {
    const { model, trans } = this;
    await this._show(
      trans.__('Compare %1', snapshot.label),
      new CompareBody(snapshot, model.snapshots, (old, other) => model.api.difference(old, other), trans)
    );
  }

  /** Start a copy of the notebook's kernel as it is, or as it was at a snapshot, and open it in a copy of the notebook. */
  async fork(snapshot?: ISnapshot): Promise<void> {
    const { model, notebooks } = this;
    const notebook = model.notebook;
    if (!notebook?.kernelId) {
      return;
    }
    const { kernelId, path } = notebook;
    const forked = await this.follower.run(() => model.api.operate('fork', kernelId, { snapshot: snapshot?.name }));
    const [copy] = (forked?.result?.kernels ?? []) as { id: string }[];
    if (forked?.state !== 'done' || copy === undefined) {
      return;
    }
    try {
      await notebooks.copyOnto(path, copy.id);
    } catch (reason) {
      // Nobody would find it again.
      await notebooks.shutDown(copy.id).catch(() => undefined);
      this.follower.complain(reason);
    }
  }

  /** Put a kernel to sleep, or wake it. */
  async operate(kind: 'sleep' | 'wake', kernelId: string): Promise<void> {
    await this.follower.run(() => this.model.api.operate(kind, kernelId, {}));
  }

  /** Put every kernel to sleep with which nothing is done now. */
  async sleepAll(): Promise<void> {
    const { model } = this;
    const awake = model.kernels.filter(({ kernel_id }) => model.stateOf(kernel_id) === 'running');
    await Promise.all(awake.map(({ kernel_id }) => this.operate('sleep', kernel_id)));
  }

  /** Say what hibernating means, and do it. */
  async hibernate(kernelId: string): Promise<void> {
    const { model, trans } = this;
    const asked = await showDialog({
      title: trans.__('Hibernate the kernel?'),
      body: new ParagraphsBody([
        trans.__('The kernel is written to disk and ended, so that it uses no memory or GPU memory.'),
        trans.__('The next cell that is run brings it back with everything it has.')
      ]),
      buttons: [Dialog.cancelButton({ label: trans.__('Cancel') }), Dialog.okButton({ label: trans.__('Hibernate') })]
    });
    if (asked.button.accept) {
      await this.follower.run(() => model.api.operate('hibernate', kernelId, {}));
    }
  }

  /** Ask whether a hibernated kernel is to come back where its notebook was opened; not where work has begun anew. */
  async offerResume(snapshot: ISnapshot): Promise<void> {
    const { model, trans } = this;
    const [hasBegun, held] = await Promise.all([this._hasBegun(), this._isHeld(snapshot)]);
    if (model.kernel === undefined || hasBegun || held) {
      return;
    }
    const asked = await showDialog({
      title: trans.__('Resume the kernel of this notebook?'),
      body: new ParagraphsBody([
        trans.__(
          'It was hibernated %1, with its variables, threads and GPU memory (%2 on the disk).',
          ago(snapshot.created, new Date()),
          size(snapshot.size)
        ),
        trans.__('If you use a new kernel, it stays in the list of snapshots, and can be resumed later.')
      ]),
      buttons: [
        Dialog.cancelButton({ label: trans.__('Use a new kernel') }),
        Dialog.okButton({ label: trans.__('Resume') })
      ]
    });
    if (asked.button.accept) {
      await this.resume(snapshot);
    }
  }

  /** Offer what was saved last of a notebook, whose kernel has died: a fresh one is there in its place. */
  async offerLast(notebook: INotebook): Promise<void> {
    const { follower, model, trans } = this;
    await model.refreshed();
    for (let left = LOOKS; left > 0 && model.isComing(notebook); left--) {
      await new Promise(resolve => window.setTimeout(resolve, BETWEEN_LOOKS));
      await model.refreshed();
    }
    const isLeft = (snapshot: ISnapshot): boolean =>
      isOf(snapshot, notebook) && !isHibernated(snapshot) && !snapshot.job;
    const [latest] = model.snapshots.filter(isLeft);
    const { kernelId } = notebook;
    if (latest === undefined || kernelId === null) {
      return;
    }
    const { label, name, created } = latest;
    const restore = (): void => void follower.run(() => model.api.operate('restore', kernelId, { from: name }));
    const saved = sinceText(created, new Date(), trans);
    Notification.warning(trans.__('The kernel died, and a fresh one was started. Last saved: %1, %2.', label, saved), {
      autoClose: false,
      actions: [{ label: trans.__('Restore %1', label), callback: restore }]
    });
  }

  /** Ask whether a notebook is to have the kernel back that outlived its server; not where work has begun anew. */
  async offerReconnect(kernel: IKernel): Promise<void> {
    const { model, trans } = this;
    const path = model.notebook?.path;
    if (path === undefined || (await this._hasBegun())) {
      return;
    }
    const asked = await showDialog({
      title: trans.__('The kernel of this notebook is still running. Reconnect?'),
      body: new ParagraphsBody([
        trans.__(
          'It outlived the server that started it, with its variables, threads and GPU memory: %1.',
          kernelText(kernel, kernel.state, trans)
        ),
        trans.__(
          'If you use a new kernel, this one keeps running. `jupyter gpuckpt stop %1` ends it.',
          kernel.kernel_id
        )
      ]),
      buttons: [
        Dialog.cancelButton({ label: trans.__('Use a new kernel') }),
        Dialog.okButton({ label: trans.__('Reconnect') })
      ]
    });
    if (asked.button.accept) {
      await this._change(async () => {
        await model.api.adopt(kernel.kernel_id);
        await this.notebooks.changeKernel(path, kernel.kernel_id);
        this.follower.tell(trans.__('Reconnected: the notebook has its kernel back.'));
      });
    }
  }

  /** Tell whether the kernel that the notebook has now has executed anything. */
  private async _hasBegun(): Promise<boolean> {
    const kernelId = this.model.kernel?.kernel_id;
    const executed = kernelId && (await this.model.api.executed(kernelId));
    return Boolean(executed && (executed.others.length > 0 || Object.keys(executed.cells).length > 0));
  }

  /** Bring a hibernated kernel back in the notebook's kernel; that of another notebook where that one is opened. */
  async resume(snapshot: ISnapshot): Promise<void> {
    const { model, notebooks, follower, trans } = this;
    const { kernel, notebook } = model;
    if (kernel !== undefined && isOf(snapshot, notebook)) {
      await follower.run(() => model.api.resume(snapshot.name, kernel.kernel_id));
      return;
    }
    const found = (await model.api.hibernated()).find(({ id }) => id === snapshot.id);
    if (found?.path) {
      await notebooks.open(found.path);
    } else {
      const what = trans.__('The notebook of %1 does not exist here.', snapshot.label);
      const then = trans.__('Restore the snapshot in any notebook with a kernel of its kind.');
      follower.complain(new ApiError({ kind: 'NoNotebook', what, why: snapshot.notebook, then }));
    }
  }

  private async _isHeld(snapshot: ISnapshot): Promise<boolean> {
    return (await this.model.api.hibernated()).every(({ id, held }) => id !== snapshot.id || held);
  }

  /** Have a kernel kept awake, or no longer; or say after how many idle seconds it goes to sleep. */
  async change(kernelId: string, changes: { pinned?: boolean; sleep_after?: number }): Promise<void> {
    await this._change(() => this.model.api.change(kernelId, changes));
  }

  /** Have a kernel saved after each cell, or no longer. */
  async autoSave(kernel: IKernel): Promise<void> {
    await this._change(() => this.model.api.auto(kernel.kernel_id, !savesItself(kernel)));
  }

  /** Ask for an address, and push a snapshot to it. */
  async share({ name, label }: ISnapshot): Promise<void> {
    const { model, trans } = this;
    const body = new AddressBody(
      trans.__('Where to'),
      this._address,
      trans.__(
        'It contains all of the kernel’s memory: data, keys, passwords. Push it only to places that may have those.'
      ),
      trans.__('Replace another snapshot of that name there'),
      trans
    );
    const asked = await this._ask(trans.__('Push %1', label), body, trans.__('Push'));
    if (asked !== null) {
      this._address = asked.url;
      await this.follower.run(() => model.api.push(name, asked.url, asked.replace));
    }
  }

  /** Say what a file with a snapshot holds, and have the browser download it. */
  async export({ name, label, size: bytes }: ISnapshot): Promise<void> {
    const { model, trans } = this;
    const asked = await showDialog({
      title: trans.__('Export %1', label),
      body: new ParagraphsBody([
        trans.__('The browser downloads the snapshot as one file (%1 before compression).', size(bytes)),
        trans.__(
          'It contains all of the kernel’s memory: data, keys, passwords. Give it only to people who may have those.'
        ),
        trans.__('`jupyter gpuckpt import FILE` imports it elsewhere.')
      ]),
      buttons: [Dialog.cancelButton({ label: trans.__('Cancel') }), Dialog.okButton({ label: trans.__('Download') })]
    });
    if (asked.button.accept) {
      try {
        // Where the server refuses, a download would tell nothing of why.
        const address = new URL(await model.api.export(name));
        const [, token] = /(?:^|; )_xsrf=([^;]*)/.exec(document.cookie) ?? [];
        if (token) {
          address.searchParams.set('_xsrf', token);
        }
        element('a', '', { href: address.href, download: '' }).click();
      } catch (reason) {
        this.follower.complain(reason);
      }
    }
  }

  /** Ask for an address and a name, and pull that snapshot. */
  async fetch(): Promise<void> {
    const { model, trans } = this;
    const body = new AddressBody(
      trans.__('Where from'),
      this._address,
      trans.__('A restored snapshot is a program that runs as you: pull only what you trust.'),
      trans.__('Replace another snapshot of that name here'),
      trans,
      true
    );
    const asked = await this._ask(trans.__('Pull a snapshot'), body, trans.__('Pull'));
    if (asked !== null) {
      this._address = asked.url;
      await this.follower.run(() => model.api.pull(asked.url, asked.name, asked.replace));
    }
  }

  /** Show what speaks for and against saving kernels on this machine. */
  async doctor(): Promise<void> {
    const { model, trans } = this;
    try {
      const { works, checks } = await model.api.doctor();
      const title = works ? trans.__('Kernels can be saved on this machine') : trans.__('Kernels cannot be saved here');
      await this._show(title, new ChecksBody(checks, trans));
    } catch (reason) {
      this.follower.complain(reason);
    }
  }

  /** Show an error with its cause and what to do next, and behind a button what was logged. */
  async explain(error: IError, operation?: string): Promise<void> {
    const { model, trans } = this;
    const logs = operation ? await model.api.log(operation).catch(() => []) : [];
    const doctor = Dialog.createButton({ label: trans.__('Check this machine'), actions: ['doctor'] });
    const log = Dialog.createButton({ label: trans.__('Show the log'), actions: ['log'] });
    const asked = await showDialog({
      title: error.what,
      body: new ErrorBody(error, trans),
      buttons: [...(logs.length ? [log] : []), doctor, Dialog.okButton({ label: trans.__('Close') })],
      defaultButton: logs.length ? 2 : 1
    });
    if (asked.button.actions.includes('doctor')) {
      await this.doctor();
    } else if (asked.button.actions.includes('log')) {
      await this._showLogs(logs);
    }
  }

  private async _showLogs(logs: ILog[]): Promise<void> {
    const { trans } = this;
    const asked = await showDialog({
      title: trans.__('What was logged'),
      body: new LogsBody(logs, trans),
      buttons: [
        Dialog.createButton({ label: trans.__('Copy'), actions: ['copy'] }),
        Dialog.okButton({ label: trans.__('Close') })
      ],
      defaultButton: 1
    });
    if (asked.button.actions.includes('copy')) {
      Clipboard.copyToSystem(logs.map(({ name, text }) => `== ${name}\n${text}`).join('\n'));
    }
  }

  private _names(of: (snapshot: ISnapshot) => boolean = () => true): Set<string> {
    return new Set(this.model.snapshots.filter(of).map(snapshot => nameOf(snapshot.name)));
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

  private async _ask<T>(title: string, body: Dialog.IBodyWidget<T>, accept: string): Promise<T | null> {
    const asked = await showDialog({
      title,
      body,
      buttons: [Dialog.cancelButton({ label: this.trans.__('Cancel') }), Dialog.okButton({ label: accept })],
      focusNodeSelector: 'input'
    });
    return asked.button.accept ? asked.value : null;
  }

  private async _show(title: string, body: Widget): Promise<void> {
    await showDialog({ title, body, buttons: [Dialog.okButton({ label: this.trans.__('Close') })] });
  }
}
