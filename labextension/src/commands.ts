/** Every command, once; palette, menus, toolbar and shortcuts are made from these. */

import type { TranslationBundle } from '@jupyterlab/translation';
import type { CommandRegistry } from '@lumino/commands';
import type { Actions } from './actions';
import { isOf } from './arrange';
import { snapshotIcon } from './icons';
import { CommandIDs } from './ids';
import type { Model } from './model';
import type { ISnapshot } from './types';

interface ITools {
  model: Model;
  actions: Actions;
  trans: TranslationBundle;
  /** Bring the sidebar to the front. */
  show: () => void;
  /** The snapshot whose line was clicked last. */
  clicked: () => ISnapshot | undefined;
}

export function addCommands(commands: CommandRegistry, { model, actions, trans, show, clicked }: ITools): void {
  const named = (args: { name?: unknown }): ISnapshot | undefined =>
    args.name === undefined ? clicked() : model.snapshots.find(snapshot => snapshot.name === args.name);
  const idle = (): boolean => model.kernel !== undefined && !model.operationOf(model.kernel.kernel_id);
  const latest = (): ISnapshot | undefined => model.snapshots.find(snapshot => isOf(snapshot, model.notebook));

  commands.addCommand(CommandIDs.save, {
    label: trans.__('Save Kernel…'),
    caption: trans.__('Save the kernel of this notebook under a name; it runs on'),
    icon: snapshotIcon,
    isEnabled: idle,
    describedBy: { args: { type: 'object', properties: {} } },
    execute: () => actions.save()
  });
  commands.addCommand(CommandIDs.restore, {
    label: args => (typeof args.name === 'string' ? trans.__('Restore %1…', args.name) : trans.__('Restore Snapshot…')),
    caption: trans.__('Put the kernel of this notebook back to the snapshot'),
    isEnabled: args => idle() && named(args) !== undefined,
    describedBy: { args: { type: 'object', properties: { name: { type: 'string' } } } },
    execute: args => {
      const snapshot = named(args);
      return snapshot && actions.restore(snapshot);
    }
  });
  commands.addCommand(CommandIDs.restoreLatest, {
    label: trans.__('Restore Latest Snapshot…'),
    caption: trans.__('Put the kernel of this notebook back to its latest snapshot'),
    isEnabled: () => idle() && latest() !== undefined,
    describedBy: { args: { type: 'object', properties: {} } },
    execute: () => {
      const snapshot = latest();
      return snapshot && actions.restore(snapshot);
    }
  });
  commands.addCommand(CommandIDs.remove, {
    label: trans.__('Remove Snapshot…'),
    isEnabled: args => named(args) !== undefined,
    describedBy: { args: { type: 'object', properties: { name: { type: 'string' } } } },
    execute: args => {
      const snapshot = named(args);
      return snapshot && actions.remove(snapshot);
    }
  });
  commands.addCommand(CommandIDs.show, {
    label: trans.__('Show Kernel Snapshots'),
    describedBy: { args: { type: 'object', properties: {} } },
    execute: show
  });
  commands.addCommand(CommandIDs.doctor, {
    label: trans.__('Can Kernels Be Saved Here?'),
    caption: trans.__('Say what speaks for and against saving kernels on this machine'),
    describedBy: { args: { type: 'object', properties: {} } },
    execute: () => actions.doctor()
  });
  model.changed.connect(() => commands.notifyCommandChanged());
}
