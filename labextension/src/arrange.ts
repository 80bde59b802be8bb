/** Which snapshots are shown, in which order: those of the notebook as the history they form, then all others. */

import type { INotebook, ISnapshot } from './types';

/** A snapshot as a line of the list. */
export interface IRow {
  snapshot: ISnapshot;
  /** How many branches lead to it from the line of the newest snapshot: 0 on that line. */
  depth: number;
  /** The name of the snapshot that it was saved after; empty where that is the next row, or where there is none. */
  origin: string;
  /** Whether its history begins with it, and the next row belongs to another one. */
  first: boolean;
}

export interface IRows {
  own: IRow[];
  others: IRow[];
}

/** Tell whether a snapshot was saved from this notebook, or from its kernel. */
export function isOf(snapshot: ISnapshot, notebook: INotebook | null): boolean {
  if (notebook === null) {
    return false;
  }
  // Of one that comes from elsewhere nothing but the end of its path can be the same.
  const isItsPath =
    snapshot.path === null ? `/${snapshot.notebook}`.endsWith(`/${notebook.path}`) : snapshot.path === notebook.path;
  return snapshot.kernel_id === notebook.kernelId || isItsPath;
}

/** Tell whether a snapshot is that of a hibernated kernel, which can be resumed; nobody resumes a job. */
export function isHibernated(snapshot: ISnapshot | undefined): boolean {
  return snapshot !== undefined && snapshot.tags.includes('hibernated') && !snapshot.job;
}

/** Tell whether every word of a search is in what is known of a snapshot. */
export function matches(snapshot: ISnapshot, search: string): boolean {
  const text = `${snapshot.label}\n${snapshot.message}\n${snapshot.notebook}\n${snapshot.job}`.toLowerCase();
  return search
    .toLowerCase()
    .split(/\s+/)
    .every(word => text.includes(word));
}

/** Return those of a notebook's snapshots that only are in the list where automatic ones are asked for. */
export function inBackground(
  snapshots: readonly ISnapshot[],
  notebook: INotebook | null,
  here: string | undefined
): ISnapshot[] {
  return snapshots.filter(
    snapshot => snapshot.automatic && !snapshot.pinned && snapshot.id !== here && isOf(snapshot, notebook)
  );
}

/** Arrange snapshots, which come newest first, and stay so; some are left out, and automatic ones of other notebooks. */
export function arrange(
  snapshots: readonly ISnapshot[],
  notebook: INotebook | null,
  search: string,
  without: readonly ISnapshot[] = []
): IRows {
  const names = new Map(snapshots.map(snapshot => [snapshot.id, snapshot.label]));
  const found = search.trim() ? snapshots.filter(snapshot => matches(snapshot, search.trim())) : snapshots;
  return {
    own: asHistory(
      leftAfter(
        found.filter(snapshot => isOf(snapshot, notebook)),
        without
      ),
      names
    ),
    others: found
      .filter(snapshot => !isOf(snapshot, notebook) && !snapshot.automatic)
      .map((snapshot, place, all) => ({
        snapshot,
        depth: 0,
        origin: all[place + 1]?.id === snapshot.parent ? '' : (names.get(snapshot.parent ?? '') ?? ''),
        first: false
      }))
  };
}

/** What is drawn of some rows at first: the newest, and wherever it lies the one that the kernel is based on. */
export function drawn(rows: readonly IRow[], limit: number, here: string | undefined): IRow[] {
  return rows.filter(({ snapshot }, place) => place < limit || snapshot.id === here);
}

/** Leave some snapshots out: what was saved after one of them was saved after what that came from. */
function leftAfter(snapshots: readonly ISnapshot[], without: readonly ISnapshot[]): ISnapshot[] {
  const origins = new Map(without.map(({ id, parent }) => [id, parent]));
  return snapshots
    .filter(({ id }) => !origins.has(id))
    .map(snapshot => {
      let { parent } = snapshot;
      for (let steps = 0; parent !== null && origins.has(parent) && steps < origins.size; steps++) {
        parent = origins.get(parent) ?? null;
      }
      return parent === snapshot.parent ? snapshot : { ...snapshot, parent };
    });
}

/** A line goes straight on from each snapshot to the newest that came from it; what else came from it is a branch. */
function asHistory(snapshots: readonly ISnapshot[], names: ReadonlyMap<string, string>): IRow[] {
  const places = new Map(snapshots.map((snapshot, place) => [snapshot.id, place]));
  const parents = snapshots.map(({ parent }, place) => {
    // A snapshot is younger than what it came from, so its place is before; the other way round is no origin.
    const at = places.get(parent ?? '') ?? -1;
    return at > place ? at : undefined;
  });
  const depths: number[] = [];
  for (const newest of snapshots.keys()) {
    const line: number[] = [];
    let at: number | undefined = newest;
    while (at !== undefined && depths[at] === undefined) {
      line.push(at);
      at = parents[at];
    }
    const depth = at === undefined ? 0 : (depths[at] ?? 0) + 1;
    line.forEach(place => (depths[place] = depth));
  }
  return snapshots.map((snapshot, place) => ({
    snapshot,
    depth: depths[place] ?? 0,
    origin: parents[place] === place + 1 ? '' : (names.get(snapshot.parent ?? '') ?? ''),
    first: parents[place] === undefined && place + 1 < snapshots.length
  }));
}
