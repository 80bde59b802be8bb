/** How far an operation is, in words. */

import type { TranslationBundle } from '@jupyterlab/translation';
import { size } from './format';
import { nameOf } from './names';
import type { IProgress } from './types';

/** Write about how long something will still take: it is an estimate. */
export function remaining(seconds: number, trans: TranslationBundle): string {
  if (seconds < 3) {
    return trans.__('a moment left');
  }
  if (seconds < 20) {
    return trans.__('about %1 s left', Math.round(seconds));
  }
  if (seconds < 87) {
    return trans.__('about %1 s left', 5 * Math.round(seconds / 5));
  }
  const minutes = Math.round(seconds / 60);
  return minutes < 90
    ? trans.__('about %1 min left', minutes)
    : trans.__('about %1 h left', Math.round(seconds / 3600));
}

/** Say how much of its step is done and how long that will still take; nothing where it is not known or matters no more. */
export function amountText({ percent, total, left, cancelling }: IProgress, trans: TranslationBundle): string {
  if (percent === null || cancelling) {
    return '';
  }
  const done = total ? trans.__('%1 % of %2', percent, size(total)) : `${percent} %`;
  return [done, ...(typeof left === 'number' ? [remaining(left, trans)] : [])].join(' · ');
}

/** Say what is done, and at which step it is. */
export function stepText(progress: IProgress, trans: TranslationBundle): string {
  const { kind, name: called, percent } = progress;
  const name = nameOf(called);
  const step = progress.cancelling ? trans.__('cancelling…') : progress.stage;
  switch (kind) {
    case 'save':
      return trans.__('Saving %1: %2', name, step);
    case 'restore':
      return trans.__('Restoring %1: %2', name || trans.__('the latest snapshot'), step);
    case 'fork':
      return trans.__('Forking the kernel: %1', step);
    case 'move':
      return trans.__('Moving the kernel: %1', step);
    case 'sleep':
      return trans.__('Putting the kernel to sleep: %1', step);
    case 'wake':
      return trans.__('Waking the kernel: %1', step);
    case 'hibernate':
      return trans.__('Hibernating the kernel: %1', step);
    case 'undo':
      return trans.__('Undoing: %1', step);
    case 'redo':
      return trans.__('Redoing: %1', step);
    case 'push':
    case 'pull': {
      const what =
        kind === 'push' ? trans.__('Pushing %1', name) : trans.__('Pulling %1', name || trans.__('a snapshot'));
      // What is measured is all that is done.
      return percent === null || progress.cancelling ? `${what}: ${step}` : `${what}:`;
    }
    default:
      return `${kind} ${name}: ${step}`;
  }
}

/** Say in one line what is done and how far it is. */
export function progressText(progress: IProgress, trans: TranslationBundle): string {
  return [stepText(progress, trans), amountText(progress, trans)].filter(Boolean).join(' ');
}
