/** Which snapshots are chosen for something to be done with all of them, by their ids. */

export type Chosen = ReadonlySet<string>;

/** Choose one, or no longer. */
export function toggled(chosen: Chosen, id: string): Chosen {
  const next = new Set(chosen);
  if (!next.delete(id)) {
    next.add(id);
  }
  return next;
}

/** Choose also all from one to another, both of them, in the order of a list; only the latter where it lacks the first. */
export function extended(chosen: Chosen, order: readonly string[], from: string | null, to: string): Chosen {
  const [at, end] = [order.indexOf(from ?? to), order.indexOf(to)];
  const [first, last] = at < 0 ? [end, end] : [Math.min(at, end), Math.max(at, end)];
  return new Set([...chosen, ...order.slice(first, last + 1)]);
}
