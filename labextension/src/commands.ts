/** Every command, once; palette, menus, toolbar, buttons and shortcuts are made from these. */

import type { TranslationBundle } from '@jupyterlab/translation';
import type { CommandRegistry } from '@lumino/commands';
import { Menu } from '@lumino/widgets';
import type { Actions } from './actions';
import { isHibernated, isOf } from './arrange';
import { redoIcon, undoIcon, type LabIcon } from '@jupyterlab/ui-components';
import { snapshotIcon } from './icons';
import { CommandIDs } from './ids';
import type { Model } from './model';
import type { IKernel, ISnapshot, State } from './types';
import { around, savesItself, type Step } from './steps';
import { whyNoStep, whyNot, whyNotIn } from './why';

interface ITools {
  model: Model;
  /** Load what the commands do. */
  actions: () => Promise<Actions>;
  trans: TranslationBundle;
  /** Bring the sidebar to the front. */
  show: () => void;
  /** The snapshot whose line was clicked last. */
  clicked: () => ISnapshot | undefined;
  /** The id of the notebook's active cell. */
  cell: () => string | undefined;
}

type Args = { name?: unknown; kernel?: unknown; seconds?: unknown };

const NO_ARGS = { args: { type: 'object', properties: {} } } as const;
const KERNEL_ARG = { args: { type: 'object', properties: { kernel: { type: 'string' } } } } as const;
const NAME_ARG = { args: { type: 'object', properties: { name: { type: 'string' } } } } as const;

export function addCommands(commands: CommandRegistry, { model, actions, trans, show, clicked, cell }: ITools): void {
  const named = (args: Args): ISnapshot | undefined =>
    args.name === undefined ? clicked() : model.snapshots.find(snapshot => snapshot.name === args.name);
  const idle = (): boolean => whyNot(model, trans) === undefined;
  const latest = (): ISnapshot | undefined =>
    model.snapshots.find(snapshot => isOf(snapshot, model.notebook) && !snapshot.automatic);
  const isJobs = (args: Args): boolean => Boolean(named(args)?.job);
  const isKernels = (args: Args): boolean => named(args)?.job === '';
  /** A command that is about one snapshot. */
  const about = (
    id: string,
    label: string | ((args: Args) => string),
    execute: (does: Actions, snapshot: ISnapshot) => Promise<void>,
    more: Partial<CommandRegistry.ICommandOptions> = {}
  ): void => {
    commands.addCommand(id, {
      label,
      isEnabled: args => named(args) !== undefined,
      describedBy: NAME_ARG,
      execute: async args => {
        const snapshot = named(args);
        return snapshot && execute(await actions(), snapshot);
      },
      ...more
    });
  };

  /** The kernel that a command names by its id, or the notebook's. */
  const meant = ({ kernel }: Args): IKernel | undefined =>
    kernel === undefined ? model.kernel : model.kernels.find(({ kernel_id }) => kernel_id === kernel);
  /** A command that is about one kernel in one of some states. */
  const aboutKernel = (
    id: string,
    label: string,
    caption: string,
    feature: string,
    states: State[],
    execute: (does: Actions, kernel: IKernel) => Promise<void>,
    more: Partial<CommandRegistry.ICommandOptions> = {}
  ): void => {
    const why = (args: Args): string | undefined => {
      const kernel = meant(args);
      return kernel ? whyNotIn(model.stateOf(kernel.kernel_id), states, trans) : trans.__('Not now: no kernel is open');
    };
    commands.addCommand(id, {
      label,
      caption: args => why(args) ?? caption,
      isEnabled: args => why(args) === undefined,
      isVisible: () => model.has(feature),
      describedBy: KERNEL_ARG,
      execute: async args => {
        const kernel = meant(args);
        return kernel && execute(await actions(), kernel);
      },
      ...more
    });
  };

  commands.addCommand(CommandIDs.save, {
    label: trans.__('Save Kernel…'),
    caption: () => whyNot(model, trans) ?? trans.__('Save this notebook’s kernel under a name; it keeps running'),
    icon: snapshotIcon,
    isEnabled: idle,
    describedBy: NO_ARGS,
    execute: async () => (await actions()).save()
  });
  about(
    CommandIDs.restore,
    args =>
      args.name === undefined
        ? trans.__('Restore Snapshot…')
        : trans.__('Restore %1…', named(args)?.label ?? args.name),
    (does, snapshot) => does.restore(snapshot),
    {
      caption: () => whyNot(model, trans) ?? trans.__('Restore this notebook’s kernel to the snapshot'),
      isEnabled: args => idle() && isKernels(args),
      isVisible: args => named(args) === undefined || isKernels(args)
    }
  );
  about(CommandIDs.restoreJob, trans.__('Restore as a Job…'), (does, snapshot) => does.restoreJob(snapshot), {
    caption: trans.__('Show how to restore the job that the snapshot was saved from'),
    isEnabled: args => isJobs(args),
    isVisible: args => isJobs(args)
  });
  about(CommandIDs.resume, trans.__('Resume Kernel'), (does, snapshot) => does.resume(snapshot), {
    caption: trans.__('Bring the hibernated kernel back, with its notebook'),
    isEnabled: args => isHibernated(named(args)),
    isVisible: args => isHibernated(named(args))
  });
  commands.addCommand(CommandIDs.restoreLatest, {
    label: trans.__('Restore Latest Snapshot…'),
    caption: () =>
      whyNot(model, trans) ??
      (latest()
        ? trans.__('Restore this notebook’s kernel to its latest snapshot')
        : trans.__('Not now: this notebook has no snapshot')),
    isEnabled: () => idle() && latest() !== undefined,
    describedBy: NO_ARGS,
    execute: async () => {
      const snapshot = latest();
      return snapshot && (await actions()).restore(snapshot);
    }
  });
  const step = (id: string, step: Step, label: string, caption: string, icon: LabIcon): void => {
    commands.addCommand(id, {
      label,
      caption: () => whyNoStep(step, model, trans) ?? caption,
      icon,
      isEnabled: () => whyNoStep(step, model, trans) === undefined,
      isVisible: () => model.has('undo'),
      describedBy: NO_ARGS,
      execute: async () => (await actions()).step(step)
    });
  };
  step(
    CommandIDs.undo,
    'undo',
    trans.__('Undo Cell'),
    trans.__('Undo what the last cell did in the kernel; the notebook stays as it is'),
    undoIcon
  );
  step(CommandIDs.redo, 'redo', trans.__('Redo Cell'), trans.__('Take back the last undo of a cell'), redoIcon);
  const restoreAround = (id: string, place: 'before' | 'after', label: string, caption: string): void => {
    const found = (): ISnapshot | undefined =>
      around(
        place,
        cell(),
        model.snapshots.filter(snapshot => isOf(snapshot, model.notebook))
      );
    commands.addCommand(id, {
      label,
      caption: () => whyNot(model, trans) ?? caption,
      isEnabled: () => idle() && found() !== undefined,
      isVisible: () => found() !== undefined,
      describedBy: NO_ARGS,
      execute: async () => {
        const snapshot = found();
        return snapshot && (await actions()).restore(snapshot);
      }
    });
  };
  restoreAround(
    CommandIDs.beforeCell,
    'before',
    trans.__('Restore State Before This Cell…'),
    trans.__('Restore the kernel to the snapshot that was saved before this cell was last run')
  );
  restoreAround(
    CommandIDs.afterCell,
    'after',
    trans.__('Restore State After This Cell…'),
    trans.__('Restore the kernel to the snapshot that was saved after this cell was last run')
  );
  aboutKernel(
    CommandIDs.auto,
    trans.__('Save After Each Cell'),
    trans.__('Save the kernel by itself, so that each cell can be undone'),
    'undo',
    ['running', 'sleeping'],
    (does, kernel) => does.autoSave(kernel),
    { isToggled: args => savesItself(meant(args)) }
  );
  about(CommandIDs.rename, trans.__('Rename Snapshot…'), (does, snapshot) => does.rename(snapshot));
  about(CommandIDs.describe, trans.__('Edit Note and Tags…'), (does, snapshot) => does.keeping.describe(snapshot));
  about(
    CommandIDs.pin,
    args => (named(args)?.pinned ? trans.__('Unpin Snapshot') : trans.__('Pin Snapshot')),
    (does, snapshot) => does.pin(snapshot),
    { caption: trans.__('A pinned snapshot cannot be removed or replaced') }
  );
  about(CommandIDs.compare, trans.__('Compare Snapshot…'), (does, snapshot) => does.compare(snapshot), {
    caption: () =>
      model.snapshots.length > 1
        ? trans.__('Show what differs between the snapshot and another')
        : trans.__('Not now: there is no other snapshot'),
    isEnabled: args => named(args) !== undefined && model.snapshots.length > 1
  });
  about(CommandIDs.share, trans.__('Push Snapshot…'), (does, snapshot) => does.share(snapshot), {
    caption: trans.__('Send a copy of the snapshot to a remote'),
    isVisible: () => model.has('push')
  });
  about(CommandIDs.export, trans.__('Export Snapshot…'), (does, snapshot) => does.export(snapshot), {
    caption: trans.__('Download the snapshot as one file'),
    isVisible: () => model.has('export')
  });
  about(CommandIDs.remove, trans.__('Remove Snapshot…'), (does, snapshot) => does.remove(snapshot), {
    caption: trans.__('Remove the snapshot permanently')
  });
  commands.addCommand(CommandIDs.removeAll, {
    label: trans.__('Remove Selected Snapshots…'),
    isEnabled: ({ names }) => Array.isArray(names) && names.length > 0,
    isVisible: () => false, // it needs names
    describedBy: { args: { type: 'object', properties: { names: { type: 'array', items: { type: 'string' } } } } },
    execute: async ({ names }) => (await actions()).keeping.removeAll((names as string[] | undefined) ?? [])
  });
  commands.addCommand(CommandIDs.fork, {
    label: trans.__('Fork into a New Notebook'),
    caption: () => whyNot(model, trans) ?? trans.__('Open a copy of this notebook with a copy of its kernel'),
    isEnabled: () => idle() && model.has('fork'),
    isVisible: () => model.has('fork'),
    describedBy: NO_ARGS,
    execute: async () => (await actions()).fork()
  });
  about(
    CommandIDs.forkSnapshot,
    trans.__('Fork Snapshot into a New Notebook'),
    (does, snapshot) => does.fork(snapshot),
    {
      caption: trans.__('Open a copy of this notebook with a kernel as it was at the snapshot'),
      isEnabled: args => idle() && isKernels(args),
      isVisible: args => model.has('fork') && !isJobs(args)
    }
  );
  aboutKernel(
    CommandIDs.sleep,
    trans.__('Put Kernel to Sleep'),
    trans.__('Free its GPU memory; its variables stay, and the next cell wakes it'),
    'sleep',
    ['running'],
    (does, kernel) => does.operate('sleep', kernel.kernel_id)
  );
  aboutKernel(
    CommandIDs.wake,
    trans.__('Wake Kernel'),
    trans.__('Move its memory back to the GPU'),
    'sleep',
    ['sleeping', 'hibernated'],
    (does, kernel) => does.operate('wake', kernel.kernel_id)
  );
  aboutKernel(
    CommandIDs.hibernate,
    trans.__('Hibernate Kernel…'),
    trans.__('Write it to disk and end it; the next cell brings it back'),
    'hibernate',
    ['running', 'sleeping'],
    (does, kernel) => does.hibernate(kernel.kernel_id)
  );
  aboutKernel(
    CommandIDs.keepAwake,
    trans.__('Keep Kernel Awake'),
    trans.__('Only you can put it to sleep'),
    'sleep',
    ['running', 'sleeping'],
    (does, kernel) => does.change(kernel.kernel_id, { pinned: !kernel.pinned }),
    { isToggled: args => meant(args)?.pinned ?? false }
  );
  commands.addCommand(CommandIDs.sleepAfter, {
    label: trans.__('Put Kernel to Sleep When Idle'),
    isEnabled: args => meant(args) !== undefined && typeof args.seconds === 'number',
    isVisible: () => false, // it needs a number
    describedBy: { args: { type: 'object', properties: { kernel: { type: 'string' }, seconds: { type: 'number' } } } },
    execute: async args => {
      const kernel = meant(args);
      return kernel && (await actions()).change(kernel.kernel_id, { sleep_after: Number(args.seconds) });
    }
  });
  commands.addCommand(CommandIDs.fetch, {
    label: trans.__('Pull Snapshot…'),
    caption: trans.__('Fetch a snapshot from a remote'),
    isEnabled: () => model.has('pull'),
    isVisible: () => model.has('pull'),
    describedBy: NO_ARGS,
    execute: async () => (await actions()).fetch()
  });
  commands.addCommand(CommandIDs.import, {
    label: trans.__('Import Snapshot…'),
    caption: trans.__('Import a snapshot that was exported as one file'),
    isEnabled: () => model.has('import'),
    isVisible: () => model.has('import'),
    describedBy: NO_ARGS,
    execute: async () => (await actions()).keeping.import()
  });
  commands.addCommand(CommandIDs.show, {
    label: trans.__('Show Kernel Snapshots'),
    describedBy: NO_ARGS,
    execute: show
  });
  commands.addCommand(CommandIDs.doctor, {
    label: trans.__('Can Kernels Be Saved Here?'),
    caption: trans.__('Check whether kernels can be saved on this machine'),
    describedBy: NO_ARGS,
    execute: async () => (await actions()).doctor()
  });
  model.changed.connect(() => commands.notifyCommandChanged());
}

/** Open a menu below its button; it is gone once it is closed, and the button has the focus again. */
export function openMenu(
  commands: CommandRegistry,
  button: HTMLElement,
  title: string,
  items: readonly Menu.IItemOptions[]
): void {
  const menu = new Menu({ commands });
  menu.title.label = title;
  items.forEach(item => menu.addItem(item));
  menu.aboutToClose.connect(() => {
    button.focus();
    requestAnimationFrame(() => menu.dispose());
  });
  const { left, bottom } = button.getBoundingClientRect();
  menu.open(left, bottom);
}

/** What can be done with a snapshot, but for restoring it. */
export const SNAPSHOT_COMMANDS: readonly (string | null)[] = [
  CommandIDs.forkSnapshot,
  CommandIDs.compare,
  null,
  CommandIDs.rename,
  CommandIDs.describe,
  CommandIDs.pin,
  CommandIDs.share,
  CommandIDs.export,
  null,
  CommandIDs.remove
];
