/** What is said, before a kernel is given up, of what it has done that is in no snapshot. */

import type { TranslationBundle } from '@jupyterlab/translation';
import { ago, seconds } from './format';
import type { IUnsaved } from './types';

/** Return it as paragraphs; none where there is nothing. */
export function unsavedText(unsaved: IUnsaved | null, now: Date, trans: TranslationBundle): string[] {
  if (unsaved === null) {
    return [];
  }
  const { cells, cell, computed } = unsaved;
  const since = ago(unsaved.since, now);
  const told: string[] = [];
  if (cells) {
    const many = [
      'In no snapshot: %1 cell, run since it was last saved, restored or started (%2).',
      'In no snapshot: %1 cells, run since it was last saved, restored or started (%2).'
    ] as const;
    told.push(trans._n(...many, cells, since));
  } else if (cell === null) {
    told.push(
      trans.__(
        'In no snapshot: %1 of computing since it was last saved, restored or started (%2).',
        seconds(computed),
        since
      )
    );
  }
  if (cell !== null) {
    told.push(trans.__('A cell is running, and is ended: [%1] %2', cell.number, cell.begins));
  }
  return told;
}
