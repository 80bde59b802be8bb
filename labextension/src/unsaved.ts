/** What is said, before a kernel is given up, of what it has done that is in no snapshot. */

import type { TranslationBundle } from '@jupyterlab/translation';
import { ago, seconds } from './format';
import type { IUnsaved } from './types';

/** Write how long ago something was, in a sentence. */
export function sinceText(then: string, now: Date, trans: TranslationBundle): string {
  const isOld = now.getTime() - new Date(then).getTime() >= 60_000;
  return isOld ? ago(then, now) : trans.__('less than a minute ago');
}

/** Return it as paragraphs; none where there is nothing. */
export function unsavedText(unsaved: IUnsaved | null, now: Date, trans: TranslationBundle): string[] {
  if (unsaved === null) {
    return [];
  }
  const { cells, cell, computed } = unsaved;
  const since = sinceText(unsaved.since, now, trans);
  const first = trans.__('It is saved first if that takes a moment, and lost otherwise.');
  const told: string[] = [];
  if (cells) {
    const many = [
      'Not saved yet: %1 cell, run since the last save, restore or start of the kernel (%2).',
      'Not saved yet: %1 cells, run since the last save, restore or start of the kernel (%2).'
    ] as const;
    told.push(`${trans._n(...many, cells, since)} ${first}`);
  } else if (cell === null) {
    told.push(
      `${trans.__(
        'Not saved yet: %1 of computing since the last save, restore or start of the kernel (%2).',
        seconds(computed),
        since
      )} ${first}`
    );
  }
  if (cell !== null) {
    told.push(trans.__('The running cell will be stopped: [%1] %2', cell.number, cell.begins));
  }
  return told;
}
