/** What differs between two snapshots, in words: the same as those of `%gpuckpt diff`. */

import { size } from './format';
import type { IDifference, IVariable } from './types';

/** From how many bytes on the size of a variable is said. */
const TELLING = 1000;

/** How many variables there are of each kind, those first that have changed. */
export function counts({ variables, unchanged }: IDifference): Record<'changed' | 'new' | 'deleted' | 'same', number> {
  const of = (how: string): number => variables.filter(row => row.how === how).length;
  const [young, deleted] = [of('new'), of('deleted')];
  return { changed: variables.length - young - deleted, new: young, deleted, same: unchanged ?? 0 };
}

/** Say what is known of a variable in the two snapshots, with the modules of its types where these have the same name. */
export function both(old: IVariable | null, young: IVariable | null): [string, string] {
  const full = old !== null && young !== null && old.type !== young.type && last(old.type) === last(young.type);
  return [described(old, full), described(young, full)];
}

function described(about: IVariable | null, full: boolean): string {
  if (about === null) {
    return '';
  }
  const { type, shape, dtype, device, length, arrays } = about;
  const bytes = Math.max(about.size ?? 0, about.holds ?? 0);
  const words = [
    full ? type : last(type),
    shape && `(${shape.join(', ')})`,
    dtype,
    device,
    length === undefined ? '' : `of length ${length}`,
    arrays === undefined ? '' : `with ${arrays} ${arrays === 1 ? 'array' : 'arrays'}`
  ];
  const large = bytes >= TELLING ? size(bytes) : '';
  return [words.filter(Boolean).join(' '), large].filter(Boolean).join(', ');
}

function last(type: string): string {
  return type.slice(type.lastIndexOf('.') + 1);
}
