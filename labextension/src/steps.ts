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

/** Tell whether a kernel is saved after its cells. */
export function savesItself(kernel: IKernel | undefined): boolean {
  return typeof kernel?.auto?.after === 'number';
}
