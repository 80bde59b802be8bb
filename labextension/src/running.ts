/** The kernels that can be saved in "Running Terminals and Kernels", with the memory that each holds. */

import type { IRunningSessions, IRunningSessionManagers } from '@jupyterlab/running';
import type { TranslationBundle } from '@jupyterlab/translation';
import { Signal } from '@lumino/signaling';
import { basename, size } from './format';
import { moonIcon, snapshotIcon } from './icons';
import type { Model } from './model';
import type { IKernel } from './types';

/** Add a section for them. */
export function addRunning(
  managers: IRunningSessionManagers,
  model: Model,
  sleepAll: () => void,
  trans: TranslationBundle
): void {
  const changed = new Signal<Model, void>(model);
  let told = '';
  const items = (): IRunningSessions.IRunningItem[] =>
    model.kernels.map(kernel => ({
      label: () => `${nameOf(kernel)}: ${held(kernel, trans)}`,
      labelTitle: () => trans.__('Memory: %1', size(kernel.memory)),
      icon: () => (kernel.gpu.freed > 0 ? moonIcon : snapshotIcon)
    }));
  model.changed.connect(() => {
    const now = JSON.stringify(items().map(item => item.label()));
    if (now !== told) {
      told = now;
      changed.emit();
    }
  });
  managers.add({
    name: trans.__('Memory of Kernels'),
    running: items,
    refreshRunning: () => model.refresh(),
    runningChanged: changed,
    shutdownAll: sleepAll,
    shutdownAllLabel: trans.__('Put All to Sleep'),
    shutdownAllConfirmationText: trans.__(
      'Put all idle kernels to sleep? They give up their GPU memory; their variables stay, and the next cell wakes each.'
    )
  });
}

/** Say what a kernel holds on GPUs, or of memory where it uses none. */
function held(kernel: IKernel, trans: TranslationBundle): string {
  if (kernel.gpu.freed > 0) {
    return trans.__('asleep, %1 freed on GPUs', size(kernel.gpu.freed));
  }
  if (kernel.gpu_memory === 0) {
    return trans.__('%1 memory', size(kernel.memory));
  }
  return trans.__('%1 on GPUs', kernel.gpu_memory === null ? trans.__('unknown') : size(kernel.gpu_memory));
}

function nameOf(kernel: IKernel): string {
  return basename(kernel.notebook) || kernel.name;
}
