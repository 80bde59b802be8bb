/** Operations under way, as this page follows them: a notification of each, and what came of it. */

import { Notification } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import { asError } from './api';
import type { Model } from './model';
import { keptIn } from './names';
import { tellInPassing } from './passing';
import { progressText } from './progress';
import type { IError, IOperation, IProgress } from './types';

/** How long an operation takes before it gets a notification of its progress, in milliseconds. */
const PROGRESS_AFTER = 500;

/** Shows an error with its cause and what to do next; the id is that of the operation that failed. */
export type Explain = (error: IError, operation?: string) => void;

/** A way to take something back. */
export type Undo = () => void;

/** The notification of an operation that this page follows. */
interface IFollowed {
  progress: IProgress;
  timer: number;
  /** The id of the notification of its progress; null before there is one. */
  notification: string | null;
  undo: Undo | undefined;
}

export class Follower {
  /** By the operation's id. */
  private readonly _followed = new Map<string, IFollowed>();
  /** The id of the notification of the last undo or redo. */
  private _step = '';
  private readonly _waiting = new Map<string, (operation: IOperation) => void>();

  constructor(
    private readonly model: Model,
    private readonly explain: Explain,
    private readonly trans: TranslationBundle
  ) {
    model.moved.connect((_, progress) => void this._onMoved(progress));
  }

  /** Begin an operation and wait for its end; give it as it ended, or null where it could not be begun. */
  async run(begin: () => Promise<IOperation>, undo?: Undo): Promise<IOperation | null> {
    try {
      const operation = await begin();
      this._show(operation, undo);
      const end = new Promise<IOperation>(resolve => this._waiting.set(operation.id, resolve));
      this.model.follow(operation);
      // It may have ended before this page knew its id.
      const now = await this.model.api.operation(operation.id);
      if (now.state !== 'running') {
        this.model.follow(now);
      }
      return await end;
    } catch (reason) {
      this.complain(reason);
      return null;
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

  /** Ask for an operation to be cancelled. */
  async cancel(id: string): Promise<void> {
    this.model.cancelling(id, true);
    try {
      await this.model.api.cancel(id);
    } catch (reason) {
      this.model.cancelling(id, false);
      this.complain(reason);
    }
  }

  /** Tell of something that was done, and offer to take it back. */
  tell(message: string, undo?: Undo, label = this.trans.__('Undo')): string {
    return tellInPassing(message, 'success', undo && [{ label, callback: undo }]);
  }

  /** Tell of an error. */
  complain(reason: unknown): void {
    this._tellError(asError(reason));
  }

  private _tellError(error: IError, operation?: string): void {
    const why = { label: this.trans.__('Why, and what next'), callback: () => this.explain(error, operation) };
    Notification.error(error.what, { autoClose: false, actions: [why] });
  }

  private _show(operation: IProgress, undo?: Undo): void {
    const followed: IFollowed = { progress: operation, notification: null, timer: 0, undo };
    followed.timer = window.setTimeout(() => {
      const cancel = (event: MouseEvent): void => {
        event.preventDefault(); // it stays open
        void this.cancel(operation.id);
      };
      followed.notification = Notification.emit(progressText(followed.progress, this.trans), 'in-progress', {
        autoClose: false,
        actions: [{ label: this.trans.__('Cancel'), callback: cancel }]
      });
    }, PROGRESS_AFTER);
    this._followed.set(operation.id, followed);
  }

  private async _onMoved(progress: IProgress): Promise<void> {
    const followed = this._followed.get(progress.id);
    if (followed === undefined) {
      return;
    }
    followed.progress = progress;
    if (progress.state === 'running') {
      if (followed.notification !== null) {
        const message = progressText(progress, this.trans);
        // It is asked for once.
        Notification.update({ id: followed.notification, message, ...(progress.cancelling ? { actions: [] } : {}) });
      }
      return;
    }
    this._followed.delete(progress.id);
    window.clearTimeout(followed.timer);
    try {
      const operation = await this.model.api.operation(progress.id);
      this._waiting.get(progress.id)?.(operation);
      await this._conclude(followed, operation);
    } catch (reason) {
      this.complain(reason);
    }
    this._waiting.delete(progress.id);
  }

  private async _conclude({ notification, undo }: IFollowed, operation: IOperation): Promise<void> {
    const text = operation.state === 'done' ? (await import('./outcome')).outcomeText(operation, this.trans) : '';
    this._tellEnd(operation, text, undo);
    // Another one, not the same with another type: where JupyterLab is still drawing a notification, which takes as
    // long as the machine lets it, it loses the change, or never closes what it changed.
    if (notification !== null) {
      // A moment later: a change of its text that is still under way would bring it back.
      window.setTimeout(() => Notification.dismiss(notification), 0);
    }
  }

  private _tellEnd(operation: IOperation, text: string, undo: Undo | undefined): void {
    const { trans } = this;
    const { id, error, kind, state } = operation;
    if (state === 'cancelled') {
      const unharmed = ['save', 'restore', 'undo', 'redo'].includes(kind);
      tellInPassing(unharmed ? trans.__('Cancelled; the kernel is as it was.') : trans.__('Cancelled.'), 'info');
    } else if (state === 'failed') {
      this._tellError(error ?? { kind: '', what: trans.__('It failed.'), why: '', then: '' }, id);
    } else if (kind === 'undo' || kind === 'redo') {
      // What the last one offers is no longer what there is to offer.
      Notification.dismiss(this._step);
      this._step = this.tell(text, undo, kind === 'undo' ? trans.__('Redo') : trans.__('Undo'));
    } else {
      this.tell(text, undo ?? this._wayBack(operation));
    }
  }

  /** Give the way back to what the kernel was before a restore, where that was saved. */
  private _wayBack({ kernel_id, result }: IOperation): Undo | undefined {
    const name = keptIn(result);
    return name && kernel_id
      ? () => void this.run(() => this.model.api.operate('restore', kernel_id, { name }))
      : undefined;
  }
}
