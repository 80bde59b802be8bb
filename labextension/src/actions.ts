/** What a person can do with kernels and snapshots, with the questions that come before. */

import { Dialog, showDialog, Notification } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import { asError } from './api';
import { ChecksBody, ErrorBody, ParagraphsBody, SaveBody } from './bodies';
import { ago, size } from './format';
import type { Model } from './model';
import { suggest } from './names';
import type { IError, IOperation, IProgress, ISnapshot } from './types';

/** For how long a notification of a success stays, in milliseconds. */
const SUCCESS_STAYS = 5000;
/** How long an operation takes before it gets a notification of its progress, in milliseconds. */
const PROGRESS_AFTER = 500;
/** How long a notification is left alone: JupyterLab loses changes of one that it is still drawing. In milliseconds. */
const DRAWN_AFTER = 1000;

/** The notification of an operation that this page follows. */
interface IFollowed {
  progress: IProgress;
  timer: number;
  /** The notification's id and when it was made; null before. */
  made: { id: string; at: number } | null;
}

/** The notification of how an operation ended. */
interface IOutcome {
  message: string;
  type: Notification.TypeOptions;
  options: { autoClose: number | false; actions: Notification.IAction[] };
}

export class Actions {
  /** By the operation's id. */
  private readonly _followed = new Map<string, IFollowed>();
  private readonly _waiting = new Map<string, (operation: IOperation) => void>();

  constructor(
    private readonly model: Model,
    private readonly trans: TranslationBundle
  ) {
    model.moved.connect((_, progress) => void this._onMoved(progress));
  }

  /** Ask for a name, and save the kernel of the notebook under it; tell whether that was done. */
  async save(): Promise<boolean> {
    const { model, trans } = this;
    const kernelId = model.notebook?.kernelId;
    if (!kernelId) {
      return false;
    }
    const taken = new Set(model.snapshots.map(snapshot => snapshot.name));
    const body = new SaveBody(suggest(model.notebook?.path ?? '', taken), taken, trans);
    const asked = await showDialog({
      title: trans.__('Save the kernel'),
      body,
      buttons: [Dialog.cancelButton({ label: trans.__('Cancel') }), Dialog.okButton({ label: trans.__('Save') })],
      focusNodeSelector: 'input'
    });
    if (!asked.button.accept || !asked.value) {
      return false;
    }
    return this._do(() => model.api.save(kernelId, asked.value as NonNullable<typeof asked.value>));
  }

  /** Ask whether to put the kernel of the notebook back to a snapshot, and do it. */
  async restore(snapshot: ISnapshot): Promise<void> {
    const { model, trans } = this;
    const kernelId = model.notebook?.kernelId;
    if (!kernelId) {
      return;
    }
    const { name, created } = snapshot;
    const saveFirst = Dialog.createButton({ label: trans.__('Save first…'), actions: ['save'] });
    const asked = await showDialog({
      title: trans.__('Restore %1?', name),
      body: new ParagraphsBody([
        trans.__('The kernel goes back to where it was when %1 was saved (%2).', name, ago(created, new Date())),
        trans.__('What came since is lost: variables, threads, GPU memory. Cells, outputs and files stay as they are.')
      ]),
      buttons: [
        Dialog.cancelButton({ label: trans.__('Cancel') }),
        saveFirst,
        Dialog.warnButton({ label: trans.__('Restore') })
      ],
      defaultButton: 2
    });
    if (!asked.button.accept || (asked.button.actions.includes('save') && !(await this.save()))) {
      return;
    }
    await this._do(() => model.api.restore(kernelId, name));
  }

  /** Ask whether to remove a snapshot, and do it. */
  async remove(snapshot: ISnapshot): Promise<void> {
    const { model, trans } = this;
    const asked = await showDialog({
      title: trans.__('Remove %1?', snapshot.name),
      body: new ParagraphsBody([trans.__('The snapshot (%1) will be gone for good.', size(snapshot.size))]),
      buttons: [Dialog.cancelButton({ label: trans.__('Cancel') }), Dialog.warnButton({ label: trans.__('Remove') })]
    });
    if (!asked.button.accept) {
      return;
    }
    try {
      const { freed } = await model.api.remove(snapshot);
      Notification.success(trans.__('Removed %1: %2 freed.', snapshot.name, size(freed)), { autoClose: SUCCESS_STAYS });
    } catch (reason) {
      this._complain(asError(reason));
    }
    model.refresh();
  }

  /** Ask for an operation to be cancelled. */
  async cancel(id: string): Promise<void> {
    try {
      await this.model.api.cancel(id);
    } catch (reason) {
      this._complain(asError(reason));
    }
  }

  /** Show what speaks for and against saving kernels on this machine. */
  async doctor(): Promise<void> {
    const { model, trans } = this;
    try {
      const { works, checks } = await model.api.doctor();
      await showDialog({
        title: works ? trans.__('Kernels can be saved on this machine') : trans.__('Kernels cannot be saved here'),
        body: new ChecksBody(checks, trans),
        buttons: [Dialog.okButton({ label: trans.__('Close') })]
      });
    } catch (reason) {
      this._complain(asError(reason));
    }
  }

  /** Show an error with its cause and what to do next. */
  async explain(error: IError): Promise<void> {
    const { trans } = this;
    const doctor = Dialog.createButton({ label: trans.__('Ask the doctor'), actions: ['doctor'] });
    const asked = await showDialog({
      title: error.what,
      body: new ErrorBody(error, trans),
      buttons: [doctor, Dialog.okButton({ label: trans.__('Close') })],
      defaultButton: 1
    });
    if (asked.button.actions.includes('doctor')) {
      await this.doctor();
    }
  }

  /** Go on showing what was under way when the page was loaded. */
  async resume(): Promise<void> {
    try {
      for (const operation of await this.model.api.operations()) {
        if (operation.state === 'running') {
          this._show(operation);
          this.model.follow(operation);
        }
      }
    } catch {
      // The list says why the server does not answer.
    }
  }

  /** Begin an operation and wait for its end; tell whether it was done. */
  private async _do(begin: () => Promise<IOperation>): Promise<boolean> {
    try {
      const operation = await begin();
      this._show(operation);
      const end = new Promise<IOperation>(resolve => this._waiting.set(operation.id, resolve));
      this.model.follow(operation);
      // It may have ended before this page knew its id.
      const now = await this.model.api.operation(operation.id);
      if (now.state !== 'running') {
        this.model.follow(now);
      }
      return (await end).state === 'done';
    } catch (reason) {
      this._complain(asError(reason));
      return false;
    }
  }

  private _show(operation: IProgress): void {
    const followed: IFollowed = { progress: operation, made: null, timer: 0 };
    followed.timer = window.setTimeout(() => {
      const cancel = (event: MouseEvent): void => {
        event.preventDefault(); // it stays open
        void this.cancel(operation.id);
      };
      const id = Notification.emit(this.progressText(followed.progress), 'in-progress', {
        autoClose: false,
        actions: [{ label: this.trans.__('Cancel'), callback: cancel }]
      });
      followed.made = { id, at: Date.now() };
    }, PROGRESS_AFTER);
    this._followed.set(operation.id, followed);
  }

  /** Say in one line how far an operation is. */
  progressText(operation: IProgress): string {
    const { trans } = this;
    const name = operation.name || trans.__('the latest snapshot');
    const percent = operation.percent === null ? '' : ` ${operation.percent} %`;
    return operation.kind === 'save'
      ? trans.__('Saving %1: %2', name, operation.stage + percent)
      : trans.__('Restoring %1: %2', name, operation.stage + percent);
  }

  private async _onMoved(progress: IProgress): Promise<void> {
    const followed = this._followed.get(progress.id);
    if (followed === undefined) {
      return;
    }
    followed.progress = progress;
    if (progress.state === 'running') {
      if (followed.made !== null) {
        Notification.update({ id: followed.made.id, message: this.progressText(progress) });
      }
      return;
    }
    this._followed.delete(progress.id);
    window.clearTimeout(followed.timer);
    try {
      const operation = await this.model.api.operation(progress.id);
      this._waiting.get(progress.id)?.(operation);
      this._conclude(followed, operation);
    } catch (reason) {
      this._complain(asError(reason));
    }
    this._waiting.delete(progress.id);
  }

  private _conclude({ made }: IFollowed, operation: IOperation): void {
    const { message, type, options } = this._outcome(operation);
    if (made === null) {
      Notification.emit(message, type, options);
    } else {
      const left = Math.max(0, made.at + DRAWN_AFTER - Date.now());
      window.setTimeout(() => Notification.update({ id: made.id, message, type, ...options }), left);
    }
  }

  private _outcome({ kind, result, error, state }: IOperation): IOutcome {
    const { trans } = this;
    if (state === 'cancelled') {
      const message = trans.__('Cancelled; the kernel is as it was.');
      return { message, type: 'info', options: { autoClose: SUCCESS_STAYS, actions: [] } };
    }
    if (error !== null || result === null) {
      const why = error ?? { kind: '', what: trans.__('It failed.'), why: '', then: '' };
      const explain = { label: trans.__('Why, and what next'), callback: () => void this.explain(why) };
      return { message: why.what, type: 'error', options: { autoClose: false, actions: [explain] } };
    }
    const seconds = result.seconds.toFixed(1);
    const message =
      kind === 'save'
        ? trans.__('Saved %1: %2 in %3 s.', result.name, size(result.size), seconds)
        : trans.__('Restored %1 in %2 s.', result.name, seconds);
    return { message, type: 'success', options: { autoClose: SUCCESS_STAYS, actions: [] } };
  }

  private _complain(error: IError): void {
    Notification.error(error.what, {
      autoClose: false,
      actions: [{ label: this.trans.__('Why, and what next'), callback: () => void this.explain(error) }]
    });
  }
}
