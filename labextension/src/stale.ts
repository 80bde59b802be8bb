/** Which cells are no part of a kernel's state after it was put back to a snapshot. */

import type { IExecuted } from './types';

/** Tell whether a cell was run, but not by the kernel as it is now: it ran after the snapshot was saved. */
export function isStale(id: string, executionCount: number | null, executed: IExecuted): boolean {
  return (
    executed.restored !== '' &&
    executionCount !== null &&
    executed.cells[id] !== executionCount &&
    !executed.others.includes(executionCount)
  );
}
