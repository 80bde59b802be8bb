/** Names of snapshots: which are allowed, and which to suggest. */

const LONGEST = 100;

/** What a name looks like, as the pattern of an input field. */
export const NAME_PATTERN = '[A-Za-z0-9_][A-Za-z0-9._\\-]{0,99}';

const ALLOWED = new RegExp(`^${NAME_PATTERN}$`);

/** Tell whether a snapshot can be called that. */
export function isName(text: string): boolean {
  return ALLOWED.test(text);
}

/** Return the name that was given to a snapshot, of what it is called in requests or of its label. */
export function nameOf(called: string): string {
  return called.slice(called.lastIndexOf(':') + 1).replace(/~.*/, '');
}

/** Give the name of the snapshot that was made of a kernel before another one took its place; empty for none. */
export function keptIn(result: Record<string, unknown> | null): string {
  return typeof result?.kept === 'string' ? result.kept : '';
}

/** Return the path of a copy of a notebook beside it, for another kernel; `taken` are the names in its folder. */
export function forkPath(path: string, taken: ReadonlySet<string>): string {
  const slash = path.lastIndexOf('/') + 1;
  const stem = path.slice(slash).replace(/\.ipynb$/, '');
  let name = `${stem}-fork.ipynb`;
  for (let number = 2; taken.has(name); number++) {
    name = `${stem}-fork-${number}.ipynb`;
  }
  return path.slice(0, slash) + name;
}

/** Suggest a name that is not taken: the notebook's, with a number. */
export function suggest(path: string, taken: ReadonlySet<string>): string {
  const file = path.slice(path.lastIndexOf('/') + 1).replace(/\.ipynb$/, '');
  const stem =
    file
      .replace(/[^A-Za-z0-9._-]+/g, '-')
      .replace(/^[.-]+|-+$/g, '')
      .slice(0, LONGEST - 6) || 'snapshot';
  let number = 1;
  while (taken.has(`${stem}-${number}`)) {
    number++;
  }
  return `${stem}-${number}`;
}
