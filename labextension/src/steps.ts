/** Undo and redo of cells, and saves after each: what a kernel can do of that. The server decides; this says it before. */

import type { IKernel, ISnapshot } from './types';

/** Back to the state before the last cell, or forward again. */
export type Step = 'undo' | 'redo';

/** Return the snapshot that a step of a kernel leads to; undefined where there is none. */
export function leadsTo(step: Step, kernel: IKernel, snapshots: readonly ISnapshot[]): ISnapshot | undefined {
  const find = (id: string | null | undefined): ISnapshot | undefined => snapshots.find(known => known.id === id);
  if (step === 'redo') {
    return find(kernel.redo);
  }
  const latest = find(kernel.parent?.id);
  return kernel.unsaved === null ? find(latest?.parent) : latest;
}

/** Return the snapshot, of some that come newest first, right before or after a cell was last executed. */
export function around(
  place: 'before' | 'after',
  cell: string | undefined,
  snapshots: readonly ISnapshot[]
): ISnapshot | undefined {
  const after = cell ? snapshots.find(known => known.cell === cell) : undefined;
  if (place === 'after' || after?.cells === undefined) {
    return after;
  }
  const origin = ({ parent, created }: ISnapshot): ISnapshot | undefined =>
    snapshots.find(known => known.id === parent && known.created < created);
  // The kernel may have been saved again after it.
  let before: ISnapshot | undefined = after;
  while (before?.cells === after.cells) {
    before = origin(before);
  }
  // Where there were more cells between, what is there is not this cell's doing alone.
  return before?.cells === after.cells - 1 ? before : undefined;
}

/** Tell whether a kernel is saved after its cells. */
export function savesItself(kernel: IKernel | undefined): boolean {
  return typeof kernel?.auto?.after === 'number';
}
