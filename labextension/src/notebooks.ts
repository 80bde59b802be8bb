/** What notebooks show of it: which one the person is at, and which cells a restore has left behind. */

import type { NotebookPanel, INotebookTracker } from '@jupyterlab/notebook';
import { NotebookActions } from '@jupyterlab/notebook';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { Model } from './model';
import { isStale } from './stale';
import type { INotebook, IProgress, ISnapshot } from './types';

const STALE = 'jp-gpuckpt-mod-stale';

/** Keep the model's notebook the one that the person is at. */
export function trackNotebook(tracker: INotebookTracker, model: Model): void {
  const update = (): void => {
    model.notebook = tracker.currentWidget && describe(tracker.currentWidget);
  };
  tracker.currentChanged.connect(update);
  tracker.widgetAdded.connect((_, panel) => {
    panel.sessionContext.kernelChanged.connect(update);
    panel.context.pathChanged.connect(update);
    void panel.sessionContext.ready.then(update);
  });
  // A cell may have saved or restored; one that ran for a moment only is not worth a question each.
  NotebookActions.executed.connect((_, { cell }) => {
    if (cell.model.sharedModel.getSource().includes('gpuckpt')) {
      model.refresh();
    }
  });
  update();
}

function describe(panel: NotebookPanel): INotebook {
  return { path: panel.context.localPath, kernelId: panel.sessionContext.session?.kernel?.id ?? null };
}

/** After a restore, mark the cells that were run after the snapshot was saved, until they are run again. */
export function markStaleCells(tracker: INotebookTracker, model: Model, trans: TranslationBundle): void {
  model.moved.connect((_, progress: IProgress) => {
    if (progress.kind === 'restore' && progress.state === 'done') {
      void model.api.operation(progress.id).then(({ result }) => {
        tracker.forEach(panel => {
          if (result !== null && panel.sessionContext.session?.kernel?.id === progress.kernel_id) {
            mark(panel, result, trans);
          }
        });
      });
    }
  });
  NotebookActions.executionScheduled.connect((_, { cell }) => unmark(cell.node));
}

function mark(panel: NotebookPanel, snapshot: ISnapshot, trans: TranslationBundle): void {
  for (const cell of panel.content.widgets) {
    const { model } = cell;
    const executionCount = model.type === 'code' ? (model.sharedModel.toJSON().execution_count as number | null) : null;
    if (isStale({ executionCount, source: model.sharedModel.getSource() }, snapshot.execution_count)) {
      cell.node.classList.add(STALE);
      cell.node.title = trans.__('Run after %1 was saved: not part of the kernel’s state.', snapshot.name);
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
