/** What differs between two snapshots, as tables: whatever kinds of contents the server tells of. */

import { size } from './format';
import type { IDifference } from './types';

export interface ICell {
  text: string;
  /** Whether it is a number, to stand under others. */
  figure: boolean;
}

/** One kind of contents. */
export interface ISection {
  /** The server's word for it. */
  kind: string;
  head: string[];
  rows: ICell[][];
}

/** Numbers in columns of such names are no bytes. */
const COUNTS = /count|number|pid|process|line|items|length/i;

/** Return the tables of what differs; what is the same in both is left out. */
export function differences(found: IDifference, old: string, young: string): ISection[] {
  const names: Record<string, string> = { old, new: young };
  const sections: ISection[] = [];
  for (const [kind, value] of Object.entries(found)) {
    const rows = asRows(value).filter(differs);
    if (rows.length === 0) {
      continue;
    }
    const columns = [...new Set(rows.flatMap(row => Object.keys(row)))];
    sections.push({
      kind,
      head: columns.map(column => names[column] ?? words(column)),
      rows: rows.map(row => columns.map(column => cell(column, row[column])))
    });
  }
  return sections;
}

type Row = Record<string, unknown>;

function isObject(value: unknown): value is Row {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

/** A list of objects has a row each; so has a list of names, and an object, by the names of its members. */
function asRows(value: unknown): Row[] {
  if (Array.isArray(value)) {
    return value.map(item => (isObject(item) ? item : { name: item as unknown }));
  }
  if (isObject(value)) {
    return Object.entries(value).map(([name, member]) =>
      isObject(member) ? { name, ...member } : { name, value: member }
    );
  }
  return [];
}

function differs(row: Row): boolean {
  const told = 'old' in row && 'new' in row;
  return !told || Boolean(row.changed) || JSON.stringify(row.old) !== JSON.stringify(row.new);
}

function cell(column: string, value: unknown): ICell {
  if (typeof value === 'number') {
    return { text: Number.isInteger(value) && !COUNTS.test(column) ? size(value) : String(value), figure: true };
  }
  if (value === null || value === undefined) {
    return { text: '–', figure: false };
  }
  return { text: isObject(value) ? described(value) : plain(value), figure: false };
}

/** What is known of one thing, such as a variable, in one line: what it is, and its size, need no words before them. */
function described(thing: Row): string {
  return Object.entries(thing)
    .map(([name, value]) => {
      if (name === 'size' && typeof value === 'number') {
        return size(value);
      }
      return name === 'type' ? plain(value) : `${name} ${plain(value)}`;
    })
    .join(', ');
}

function plain(value: unknown): string {
  return typeof value === 'string' ? value : JSON.stringify(value);
}

/** Write a member's name as people do. */
export function words(name: string): string {
  const text = name.replace(/_/g, ' ');
  return text.charAt(0).toUpperCase() + text.slice(1);
}
