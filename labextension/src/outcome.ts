/** What came of operations, in words. Loaded when the first one has ended. */

import type { TranslationBundle } from '@jupyterlab/translation';
import { size } from './format';
import { keptIn, nameOf } from './names';
import type { IOperation, ISnapshot } from './types';

/** Say what came of an operation that is done. */
export function outcomeText({ kind, name: called, result }: IOperation, trans: TranslationBundle): string {
  const name = nameOf(called);
  const seconds = Number(result?.seconds ?? 0).toFixed(1);
  switch (kind) {
    case 'save':
      return trans.__('Saved %1: %2 in %3 s.', name, size(Number(result?.size ?? 0)), seconds);
    case 'restore':
      return [
        trans.__('Restored %1 in %2 s.', name, seconds),
        ...(keptIn(result) ? [trans.__('What the kernel was before is kept as %1.', keptIn(result))] : [])
      ].join(' ');
    case 'undo':
      return [trans.__('Undone in %1 s.', seconds), whereTo(result, trans)].join(' ');
    case 'redo':
      return [trans.__('Redone in %1 s.', seconds), whereTo(result, trans)].join(' ');
    case 'fork':
      return trans.__('Forked the kernel.');
    case 'move':
      return trans.__('Moved the kernel.');
    case 'sleep':
      return result?.freed
        ? trans.__('Asleep: %1 of GPU memory freed in %2 s.', size(Number(result.freed)), seconds)
        : trans.__('Asleep in %1 s; there was no GPU memory to free.', seconds);
    case 'wake':
      return trans.__('Woke in %1 s.', seconds);
    case 'hibernate':
      return trans.__('Hibernated in %1 s. The next cell brings the kernel back.', seconds);
    case 'push':
      return result?.encrypted ? trans.__('Pushed %1, encrypted.', name) : trans.__('Pushed %1, not encrypted.', name);
    case 'pull':
      return trans.__('Pulled %1.', name);
    default:
      return trans.__('Done: %1 %2.', kind, name);
  }
}

/** Say where an undo or a redo has led to. */
function whereTo(result: IOperation['result'], trans: TranslationBundle): string {
  const { automatic, message = '', name = '' } = (result ?? {}) as Partial<ISnapshot>;
  if (!automatic || !message) {
    return trans.__('The kernel is as it was at %1.', nameOf(name));
  }
  return message.startsWith('in the middle of:')
    ? trans.__('The kernel is as it was %1', message)
    : trans.__('The kernel is as it was after “%1”.', message);
}
