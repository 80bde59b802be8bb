/** Snapshots of kernels in JupyterLab and Notebook: what is put together of what. */

import { ILabShell, ILayoutRestorer, type JupyterFrontEnd, type JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette, IToolbarWidgetRegistry } from '@jupyterlab/apputils';
import { INotebookTracker, type NotebookPanel } from '@jupyterlab/notebook';
import { IRunningSessionManagers } from '@jupyterlab/running';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import type { Actions } from './actions';
import { Api } from './api';
import { addCommands } from './commands';
import { Follower } from './follow';
import { CommandIDs } from './ids';
import { Model } from './model';
import { markStaleCells, offerAfterCrash, offerToReconnect, offerToResume, trackNotebook } from './notebooks';
import { followPreferences } from './preferences';
import { addRunning } from './running';
import { Sidebar } from './sidebar';
import { StatusItem } from './status';
import { Indicator, restoreButton } from './toolbar';

const ID = 'jupyter_gpuckpt:plugin';

function activate(
  app: JupyterFrontEnd,
  tracker: INotebookTracker,
  translator: ITranslator | null,
  palette: ICommandPalette | null,
  restorer: ILayoutRestorer | null,
  labShell: ILabShell | null,
  statusBar: IStatusBar | null,
  toolbars: IToolbarWidgetRegistry | null,
  managers: IRunningSessionManagers | null,
  settings: ISettingRegistry | null
): void {
  const trans = (translator ?? nullTranslator).load('jupyter_gpuckpt');
  const { commands, serviceManager, shell } = app;
  const model = new Model(new Api(serviceManager.serverSettings), serviceManager.events.stream);
  // Most pages are left without anything of this having been done: it is loaded when it is first wanted.
  let loaded: Promise<Actions> | undefined;
  const actions = (): Promise<Actions> =>
    (loaded ??= Promise.all([import('./actions'), import('./copies')]).then(
      ([{ Actions }, { copiesOf }]) => new Actions(model, follower, copiesOf(tracker, serviceManager, commands), trans)
    ));
  const follower = new Follower(
    model,
    (error, operation) => void actions().then(does => does.explain(error, operation)),
    trans
  );
  const sidebar = new Sidebar({ model, follower, commands, trans }, () => {
    if (tracker.currentWidget) {
      shell.activateById(tracker.currentWidget.id);
    }
  });

  addCommands(commands, {
    model,
    actions,
    trans,
    show: () => (sidebar.node.contains(document.activeElement) ? sidebar.leave() : shell.activateById(sidebar.id)),
    clicked: () => {
      const line = app.contextMenuHitTest(node => node.dataset.snapshot !== undefined);
      return model.snapshots.find(snapshot => snapshot.name === line?.dataset.snapshot);
    },
    cell: () => tracker.activeCell?.model.sharedModel.getId()
  });
  const { save, restoreLatest, undo, redo, auto, fork, sleep, wake, hibernate, keepAwake, fetch, show, doctor } =
    CommandIDs;
  for (const command of [
    save,
    restoreLatest,
    undo,
    redo,
    auto,
    fork,
    sleep,
    wake,
    hibernate,
    keepAwake,
    fetch,
    show,
    doctor,
    CommandIDs.import
  ]) {
    palette?.addItem({ command, category: trans.__('Kernel Snapshots') });
  }

  shell.add(sidebar, 'left', { rank: 350, type: 'Kernel Snapshots' });
  restorer?.add(sidebar, sidebar.id);
  const item = new StatusItem(model, follower, trans);
  statusBar?.registerStatusItem(ID, {
    item,
    align: 'middle',
    isActive: () => model.running.length > 0,
    activeStateChanged: model.changed
  });
  if (labShell === null || statusBar === null) {
    item.dispose(); // Notebook has no status bar; the notification and the sidebar say the same
  }
  toolbars?.addFactory<NotebookPanel>('Notebook', 'gpuckpt-restore', () => restoreButton(model, commands, trans));
  toolbars?.addFactory<NotebookPanel>('Notebook', 'gpuckpt-state', panel => new Indicator(panel, model, trans));
  if (managers) {
    addRunning(managers, model, () => void actions().then(does => does.sleepAll()), trans);
  }

  if (settings) {
    void followPreferences(settings, ID, preferences => (model.preferences = preferences));
  }
  trackNotebook(tracker, model);
  markStaleCells(tracker, model, trans);
  offerToResume(model, actions);
  offerToReconnect(tracker, model, actions);
  offerAfterCrash(tracker, actions);
  // Terminals and consoles save, too.
  labShell?.currentChanged.connect(() => model.refresh());
  void app.restored.then(() => {
    model.refresh();
    return follower.resume();
  });
}

const plugin: JupyterFrontEndPlugin<void> = {
  id: ID,
  description: 'Saves live kernels with all that they have on the GPU, and restores them.',
  autoStart: true,
  requires: [INotebookTracker],
  optional: [
    ITranslator,
    ICommandPalette,
    ILayoutRestorer,
    ILabShell,
    IStatusBar,
    IToolbarWidgetRegistry,
    IRunningSessionManagers,
    ISettingRegistry
  ],
  activate
};

export default plugin;
