/** What notebooks show of it: which one the person is at, and which cells a restore has left behind. */

import type { Cell, CodeCell } from '@jupyterlab/cells';
import type { INotebookTracker, Notebook, NotebookPanel } from '@jupyterlab/notebook';
import { NotebookActions } from '@jupyterlab/notebook';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { Actions } from './actions';
import { isHibernated, isOf } from './arrange';
import type { Model } from './model';
import { isStale } from './stale';
import type { IExecuted, IKernel, INotebook, ISnapshot } from './types';

const STALE = 'jp-gpuckpt-mod-stale';
/** How the error is called that a cell ends with which ran when its kernel was put back to a snapshot. */
const ENDED = 'RestoreFailed';
/** JupyterLab's class of where a cell asks for input. */
const ASKS = 'jp-OutputArea-stdin-item';

/** Keep the model's notebook the one that the person is at. */
export function trackNotebook(tracker: INotebookTracker, model: Model): void {
  const update = (): void => {
    model.notebook = tracker.currentWidget && describe(tracker.currentWidget);
  };
  tracker.currentChanged.connect(update);
  tracker.widgetAdded.connect((_, panel) => {
    const { sessionContext } = panel;
    let restarting = false;
    sessionContext.kernelChanged.connect(update);
    sessionContext.statusChanged.connect((_, status) => {
      if (restarting && status === 'idle') {
        model.refresh();
      }
      if (/restarting|dead/.test(status)) {
        model.told(sessionContext.session?.kernel?.id ?? '', status);
      }
      restarting = /restarting|dead/.test(status) || (restarting && status !== 'idle');
    });
    // A kernel that is put back or woken says so, whoever asked for it: a cell, a terminal, another window.
    sessionContext.iopubMessage.connect((_, { content }) => {
      if ('gpuckpt' in content) {
        model.told(sessionContext.session?.kernel?.id ?? '', content.gpuckpt);
      }
    });
    panel.context.pathChanged.connect(update);
    void sessionContext.ready.then(update);
  });
  const panelOf = (notebook: Notebook): NotebookPanel | undefined =>
    tracker.find(({ content }) => content === notebook);
  const mayHaveSaved = (cell: Cell): boolean => cell.model.sharedModel.getSource().includes('gpuckpt');
  // What runs can be undone, too.
  NotebookActions.executionScheduled.connect((_, { cell, notebook }) => {
    if (!mayHaveSaved(cell)) {
      model.ran(panelOf(notebook)?.sessionContext.session?.kernel?.id);
    }
  });
  // A cell may have saved or restored; one that ran for a moment only is not worth a question each.
  NotebookActions.executed.connect((_, { cell, notebook, error }) => {
    const panel = panelOf(notebook);
    if (error?.errorName === ENDED) {
      endInput(cell, panel);
    }
    if (mayHaveSaved(cell)) {
      model.refresh();
    } else {
      model.ran(panel?.sessionContext.session?.kernel?.id);
    }
  });
  update();
}

/** Ask for no input that a cell has waited for which ended: until there is some, JupyterLab executes no other cell. */
function endInput(cell: Cell, panel: NotebookPanel | undefined): void {
  const asks = (cell as CodeCell).outputArea.widgets.filter(output => output.hasClass(ASKS));
  const kernel = panel?.sessionContext.session?.kernel;
  if (kernel && asks.length > 0) {
    asks.forEach(output => output.dispose());
    kernel.hasPendingInput = false;
  }
}

/** Ask once whether to resume the hibernated kernel of a notebook that was opened with a fresh one. */
export function offerToResume(model: Model, actions: () => Promise<Actions>): void {
  const offered = new Set<string>();
  model.changed.connect(() => {
    const { notebook, kernel } = model;
    const hibernated = (snapshot: ISnapshot): boolean => isHibernated(snapshot) && isOf(snapshot, notebook);
    const asks = kernel && model.preferences.offerToResume && model.isIdle(kernel.kernel_id);
    const found = asks ? model.snapshots.find(hibernated) : undefined;
    if (found !== undefined && !offered.has(found.id) && model.wakesFrom(found) === undefined) {
      offered.add(found.id);
      void actions().then(does => does.offerResume(found));
    }
  });
}

/** Ask once whether a notebook is to have the kernel back that outlived its server. */
export function offerToReconnect(tracker: INotebookTracker, model: Model, actions: () => Promise<Actions>): void {
  const offered = new Set<string>();
  model.changed.connect(() => {
    model.kernels.filter(({ attended }) => attended).forEach(({ kernel_id }) => offered.delete(kernel_id));
    const { notebook } = model;
    // A page that was open sees its own kernel go some time after the server has.
    const isLeft = ({ kernel_id, reconnect }: IKernel): boolean =>
      reconnect === notebook?.path && kernel_id !== notebook.kernelId;
    const found = notebook ? model.kernels.find(isLeft) : undefined;
    if (found && !offered.has(found.kernel_id) && tracker.currentWidget?.sessionContext.isReady) {
      offered.add(found.kernel_id);
      void actions().then(does => does.offerReconnect(found));
    }
  });
}

/** Offer the last snapshot of a notebook whose kernel died, and was started anew by itself. */
export function offerAfterCrash(tracker: INotebookTracker, actions: () => Promise<Actions>): void {
  tracker.widgetAdded.connect((_, panel) => {
    let died = false;
    panel.sessionContext.statusChanged.connect((_, status) => {
      died ||= status === 'autorestarting';
      if (died && status === 'idle') {
        died = false;
        void actions().then(does => does.offerLast(describe(panel)));
      }
    });
  });
}

function describe(panel: NotebookPanel): INotebook {
  return { path: panel.context.localPath, kernelId: panel.sessionContext.session?.kernel?.id ?? null };
}

/**
 * Mark the cells that were run after the snapshot was saved that their kernel was put back to, until they are run again.
 *
 * The kernel itself knows which cells it has run, so the marks are the same in every window and after a reload.
 */
export function markStaleCells(tracker: INotebookTracker, model: Model, trans: TranslationBundle): void {
  /** The life of its kernel that each notebook was marked for. */
  const marked = new WeakMap<NotebookPanel, string>();
  model.changed.connect(() =>
    tracker.forEach(panel => {
      const kernelId = panel.sessionContext.session?.kernel?.id;
      const kernel = model.kernels.find(candidate => candidate.kernel_id === kernelId);
      const { markStaleCells } = model.preferences;
      const life = `${kernelId} ${kernel?.started} ${markStaleCells}`;
      if (kernel === undefined || marked.get(panel) === life || model.stateOf(kernelId) === 'restoring') {
        return;
      }
      marked.set(panel, life);
      if (!markStaleCells) {
        panel.content.widgets.forEach(cell => unmark(cell.node));
        return;
      }
      void panel.revealed
        .then(() => model.api.executed(kernel.kernel_id))
        .then(executed => mark(panel, executed, trans))
        .catch(() => marked.delete(panel)); // it is asked again with the next change
    })
  );
  NotebookActions.executionScheduled.connect((_, { cell }) => unmark(cell.node));
  // The cell that asked for a restore had another number until it was answered.
  NotebookActions.executed.connect((_, { cell, success }) => {
    if (success) {
      unmark(cell.node);
    }
  });
}

function mark(panel: NotebookPanel, executed: IExecuted, trans: TranslationBundle): void {
  for (const cell of panel.content.widgets) {
    const { type, sharedModel } = cell.model;
    const count = type === 'code' ? (sharedModel.toJSON().execution_count as number | null) : null;
    if (isStale(sharedModel.getId(), count, executed)) {
      cell.node.classList.add(STALE);
      cell.node.title = trans.__('Run after %1 was saved: not part of the kernel’s state.', executed.restored);
    } else {
      unmark(cell.node);
    }
  }
}

function unmark(node: HTMLElement): void {
  if (node.classList.contains(STALE)) {
    node.classList.remove(STALE);
    node.removeAttribute('title');
  }
}
