/** The dialog that says what differs between two snapshots. */

import type { TranslationBundle } from '@jupyterlab/translation';
import { Widget } from '@lumino/widgets';
import { asError } from './api';
import { element } from './bodies';
import { differences, words, type ISection } from './difference';
import { size } from './format';
import type { IDifference, ISnapshot } from './types';

/** How many rows of a table are shown. */
const SHOWN = 50;

type Ask = (old: string, other: string) => Promise<IDifference>;

export class CompareBody extends Widget {
  private readonly _found = element('div', '', { className: 'jp-gpuckpt-Found', tabIndex: 0 });
  private readonly _choice = element('select', '', { id: 'jp-gpuckpt-other' });

  constructor(
    private readonly snapshot: ISnapshot,
    private readonly snapshots: readonly ISnapshot[],
    private readonly ask: Ask,
    private readonly trans: TranslationBundle
  ) {
    super();
    this.addClass('jp-gpuckpt-Body');
    this.addClass('jp-gpuckpt-mod-wide');
    const others = snapshots.filter(({ id }) => id !== snapshot.id);
    const label = element('label', trans.__('With'), { htmlFor: this._choice.id });
    this._choice.append(...others.map(({ label, id }) => element('option', label, { value: id })));
    this._choice.value = (others.find(({ id }) => id === snapshot.parent) ?? others[0])?.id ?? '';
    this._choice.className = 'jp-mod-styled';
    this._found.setAttribute('role', 'region');
    this._found.setAttribute('aria-label', trans.__('What differs'));
    this._found.setAttribute('aria-live', 'polite');
    this.node.append(label, this._choice, this._found);
    this._choice.addEventListener('change', () => void this._compare());
    void this._compare();
  }

  private async _compare(): Promise<void> {
    const { snapshot, trans } = this;
    const id = this._choice.value;
    const other = this.snapshots.find(candidate => candidate.id === id);
    if (other === undefined) {
      this._found.replaceChildren(element('p', trans.__('There is no other snapshot.')));
      return;
    }
    this._found.replaceChildren(element('p', trans.__('Comparing …')));
    const [old, young] = other.created < snapshot.created ? [other, snapshot] : [snapshot, other];
    let shown: Node[];
    try {
      shown = this._draw(await this.ask(old.name, young.name), old.label, young.label);
    } catch (reason) {
      const error = asError(reason);
      shown = [error.what, error.why, error.then].map(text => element('p', text));
    }
    if (this._choice.value === id) {
      this._found.replaceChildren(...shown);
    }
  }

  private _draw(found: IDifference, old: string, young: string): Node[] {
    const { trans } = this;
    const sections = differences(found, old, young);
    if (sections.length === 0) {
      return [element('p', trans.__('They hold the same.'))];
    }
    const changed = Number(found.changed ?? 0);
    const sum = changed > 0 ? [element('p', trans.__('%1 of %2 are not in %3.', size(changed), young, old))] : [];
    return [...sum, ...sections.flatMap(section => this._section(section))];
  }

  private _section({ kind, head, rows }: ISection): Node[] {
    const { trans } = this;
    const titles: Record<string, string> = {
      variables: trans.__('Variables'),
      memory: trans.__('Memory'),
      gpu_memory: trans.__('GPU memory'),
      used_files: trans.__('Files in use'),
      kept_files: trans.__('Files kept with the snapshot'),
      files: trans.__('Parts of the snapshot')
    };
    const heading = element('h3', titles[kind] ?? words(kind));
    const table = element('table');
    if (head.length) {
      const row = element('tr');
      row.append(...head.map(text => element('th', text, { scope: 'col' })));
      table.createTHead().append(row);
    }
    const body = table.createTBody();
    for (const cells of rows.slice(0, SHOWN)) {
      const row = element('tr');
      row.append(...cells.map(({ text, figure }) => element('td', text, { className: figure ? 'jp-mod-figure' : '' })));
      body.append(row);
    }
    const more = rows.length - SHOWN;
    return [heading, table, ...(more > 0 ? [element('p', this.trans.__('and %1 more', more))] : [])];
  }
}
