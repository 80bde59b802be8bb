/** The kernels that can be saved in "Running Terminals and Kernels", with the GPU memory that each holds. */

import type { IRunningSessions, IRunningSessionManagers } from '@jupyterlab/running';
import type { TranslationBundle } from '@jupyterlab/translation';
import { Signal } from '@lumino/signaling';
import { basename, size } from './format';
import { moonIcon, snapshotIcon } from './icons';
import type { Model } from './model';
import type { IKernel } from './types';

/** Add a section for them. */
export function addRunning(managers: IRunningSessionManagers, model: Model, trans: TranslationBundle): void {
  const changed = new Signal<Model, void>(model);
  let told = '';
  const items = (): IRunningSessions.IRunningItem[] =>
    model.kernels.map(kernel => ({
      label: () =>
        kernel.gpu.freed > 0
          ? trans.__('%1: asleep, %2 freed on GPUs', nameOf(kernel), size(kernel.gpu.freed))
          : trans.__(
              '%1: %2 on GPUs',
              nameOf(kernel),
              kernel.gpu_memory === null ? trans.__('unknown') : size(kernel.gpu_memory)
            ),
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
    name: trans.__('GPU Memory of Kernels'),
    running: items,
    refreshRunning: () => model.refresh(),
    runningChanged: changed,
    shutdownAll: () => undefined,
    shutdownAllLabel: '',
    shutdownAllConfirmationText: ''
  });
}

function nameOf(kernel: IKernel): string {
  return basename(kernel.notebook) || kernel.name;
}
