/** Which cells are no part of a kernel's state after it was put back to a snapshot. */

/** A code cell as far as that needs it. */
export interface IRunCell {
  executionCount: number | null;
  source: string;
}

/**
 * Tell whether a cell was run after the snapshot was saved.
 *
 * A snapshot saved from within a cell has that cell's number; one saved between two cells has the number that the
 * next cell will have. So a cell of that very number was run later, unless it is the one that saved.
 */
export function isStale(cell: IRunCell, savedAt: number | null): boolean {
  if (savedAt === null || cell.executionCount === null) {
    return false;
  }
  return cell.executionCount > savedAt || (cell.executionCount === savedAt && !cell.source.includes('gpuckpt'));
}
