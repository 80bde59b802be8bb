/** Why nothing can be done with the notebook's kernel now, for buttons that cannot be pressed. */

import type { TranslationBundle } from '@jupyterlab/translation';
import type { Model } from './model';

/** Return the reason, or undefined where it can be saved and restored. */
export function whyNot(model: Model, trans: TranslationBundle): string | undefined {
  const { kernel, notebook } = model;
  if (kernel && model.isIdle(kernel.kernel_id)) {
    return undefined;
  }
  if (notebook === null) {
    return trans.__('Not now: open a notebook first');
  }
  if (notebook.kernelId === null) {
    return trans.__('Not now: this notebook has no kernel');
  }
  if (kernel === undefined) {
    return (model.unavailable ?? model.plain?.why)?.what ?? trans.__('Not now: the kernel is starting');
  }
  switch (model.stateOf(kernel.kernel_id)) {
    case 'hibernated':
      return trans.__('Not now: the kernel is hibernated; wake it first');
    case 'ended':
      return trans.__('Not now: the kernel has ended');
    default:
      return trans.__('Not now: the kernel is being saved, restored or moved');
  }
}
