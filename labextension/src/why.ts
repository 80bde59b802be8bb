/** Why nothing can be done with the notebook's kernel now, for buttons that cannot be pressed. */

import type { TranslationBundle } from '@jupyterlab/translation';
import type { Model } from './model';
import { leadsTo, type Step } from './steps';
import type { State } from './types';

/** Return the reason, or undefined where it can be saved and restored. */
export function whyNot(model: Model, trans: TranslationBundle): string | undefined {
  const { kernel, notebook } = model;
  if (kernel && model.isIdle(kernel.kernel_id)) {
    return undefined;
  }
  if (!notebook?.kernelId) {
    return trans.__('Not now: no kernel is open');
  }
  if (kernel === undefined) {
    return (model.unavailable ?? model.plain?.why)?.what ?? trans.__('Not now: the kernel is starting');
  }
  return model.stateOf(kernel.kernel_id) === 'hibernated'
    ? trans.__('Not now: wake the kernel first')
    : trans.__('Not now: the kernel is busy');
}

/** Return why the notebook's kernel cannot go a step back or forward; undefined where it can. */
export function whyNoStep(step: Step, model: Model, trans: TranslationBundle): string | undefined {
  const { kernel, snapshots } = model;
  const why = whyNot(model, trans);
  if (why !== undefined || !kernel || leadsTo(step, kernel, snapshots)) {
    return why;
  }
  return step === 'undo'
    ? trans.__('Not now: the kernel was not saved before its last cell')
    : trans.__('Not now: nothing was undone since the last save');
}

/** Return why a kernel in this state is in none of those that something needs; undefined where it is. */
export function whyNotIn(state: State, needed: readonly State[], trans: TranslationBundle): string | undefined {
  if (needed.includes(state)) {
    return undefined;
  }
  switch (state) {
    case 'running':
      return trans.__('Not now: the kernel is awake');
    case 'sleeping':
      return trans.__('Not now: the kernel is asleep already');
    case 'hibernated':
      return trans.__('Not now: the kernel is hibernated already');
    default:
      return trans.__('Not now: the kernel is busy');
  }
}
