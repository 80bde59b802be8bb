/** Which snapshots are shown, in which order: those of the notebook as the tree they form, then all others. */

import type { INotebook, ISnapshot } from './types';

/** A snapshot as a line of the list. */
export interface IRow {
  snapshot: ISnapshot;
  /** How many ancestors of it stand above it. */
  depth: number;
  /** The name of the snapshot that its kernel had come from; empty where there is none, or none any more. */
  origin: string;
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
  // The server writes down the whole path, JupyterLab knows the one below the server's root.
  return (
    snapshot.kernel_id === notebook.kernelId ||
    snapshot.notebook === notebook.path ||
    snapshot.notebook.endsWith(`/${notebook.path}`)
  );
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

/** Arrange snapshots, which come newest first. */
export function arrange(snapshots: readonly ISnapshot[], notebook: INotebook | null, search: string): IRows {
  const names = new Map(snapshots.map(snapshot => [snapshot.id, snapshot.label]));
  const row = (snapshot: ISnapshot, depth: number): IRow => ({
    snapshot,
    depth,
    origin: (snapshot.parent && names.get(snapshot.parent)) || ''
  });
  const found = search.trim() ? snapshots.filter(snapshot => matches(snapshot, search.trim())) : snapshots;
  const own = found.filter(snapshot => isOf(snapshot, notebook));
  const others = found.filter(snapshot => !isOf(snapshot, notebook));
  return { own: asTree(own, row), others: others.map(snapshot => row(snapshot, 0)) };
}

function asTree(snapshots: readonly ISnapshot[], row: (snapshot: ISnapshot, depth: number) => IRow): IRow[] {
  // A snapshot is younger than what it came from, so its place in the list is before; the other way round is no origin.
  const places = new Map(snapshots.map((snapshot, place) => [snapshot.id, place]));
  const children = new Map<string | null, ISnapshot[]>();
  for (const [place, snapshot] of snapshots.entries()) {
    const parent = (places.get(snapshot.parent ?? '') ?? -1) > place ? snapshot.parent : null;
    children.set(parent, [...(children.get(parent) ?? []), snapshot]);
  }
  const rows: IRow[] = [];
  // Not recursive: a notebook saved a thousand times in a row is a thousand deep.
  const pending = (children.get(null) ?? []).map(snapshot => row(snapshot, 0)).reverse();
  for (let next = pending.pop(); next !== undefined; next = pending.pop()) {
    rows.push(next);
    const depth = next.depth + 1;
    pending.push(...(children.get(next.snapshot.id) ?? []).map(snapshot => row(snapshot, depth)).reverse());
  }
  return rows;
}
