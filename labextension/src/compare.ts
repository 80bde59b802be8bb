/** The dialog that says what differs between two snapshots. */

import type { TranslationBundle } from '@jupyterlab/translation';
import { Widget } from '@lumino/widgets';
import { asError } from './api';
import { element } from './bodies';
import { both, counts } from './difference';
import { size } from './format';
import type { IChange, IDifference, ISnapshot } from './types';

/** How many rows of a table are shown; a snapshot names 2,000 variables at most. */
const SHOWN = 4000;
/** How many names a line has. */
const NAMES = 20;

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
    const variable = ({ name, how, old, new: young }: IDifference['variables'][number]): HTMLTableRowElement =>
      row(name, how, both(old, young));
    const file = ({ path, how }: { path: string; how: string }): HTMLTableRowElement => row(path, how, []);
    const parts = found.unchanged === null ? found.files.filter(isOther) : []; // nothing else is known of what is in it
    return [
      ...this._aboutVariables(found),
      element('p', this._aboutMemory(found, old, young)),
      ...this._table(trans.__('Variables'), [trans.__('Variable'), old, young], found.variables.map(variable)),
      ...this._table(trans.__('Files'), [trans.__('File')], [...found.used_files, ...found.kept_files].map(file)),
      ...this._table(trans.__('Parts of the snapshot'), [trans.__('Part'), old, young], parts.map(part))
    ];
  }

  private _aboutVariables(found: IDifference): Node[] {
    const { trans } = this;
    if (found.unchanged === null) {
      return [
        element(
          'p',
          trans.__('Nothing is known of variables: one of the two is not of a Python kernel with our agent.')
        )
      ];
    }
    const { changed, new: young, deleted, same } = counts(found);
    const told = [
      changed && trans.__('%1 changed', changed),
      young && trans.__('%1 new', young),
      deleted && trans.__('%1 deleted', deleted),
      same && trans.__('%1 unchanged', same)
    ].filter(Boolean);
    const sum = trans.__('Variables: %1.', told.join(', ') || trans.__('none changed'));
    const shown = [element('p', sum, { className: 'jp-gpuckpt-Sum' })];
    const names = found.not_compared;
    if (names.length > 0) {
      const few = names.slice(0, NAMES).join(', ');
      const some = names.length > NAMES ? trans.__('%1 and %2 more', few, names.length - NAMES) : few;
      shown.push(
        element(
          'p',
          found.same_origin
            ? trans.__('May have changed: %1 (only types and sizes are known).', some)
            : trans.__(
                'May have changed: %1 (only types and sizes are known, as the snapshots are of different kernels).',
                some
              ),
          { title: names.join(', ') }
        )
      );
    }
    return shown;
  }

  /** Say in a line by how much they differ. */
  private _aboutMemory({ changed, memory, gpu_memory }: IDifference, old: string, young: string): string {
    const { trans } = this;
    if (changed === 0) {
      return trans.__('%1 and %2 hold the same.', old, young);
    }
    const sum = (changes: IChange[]): number => changes.reduce((sum, { changed }) => sum + changed, 0);
    const [host, gpu] = [sum(memory), sum(gpu_memory)];
    const amounts = [
      host && trans.__('%1 of memory', size(host)),
      gpu && trans.__('%1 of GPU memory', size(gpu))
    ].filter(Boolean);
    const ofIt = amounts.length > 0 ? ` (${amounts.join(', ')})` : '';
    return trans.__('%1 differs from %2 by %3%4.', young, old, size(changed), ofIt);
  }

  /** A table of what has changed and how, if there is something. */
  private _table(title: string, [first = '', ...others]: string[], rows: HTMLTableRowElement[]): Node[] {
    if (rows.length === 0) {
      return [];
    }
    const table = element('table', '', { ariaLabel: title });
    const head = element('tr');
    head.append(
      ...[first, this.trans.__('Change'), ...others].map(text => element('th', text, { scope: 'col', title: text }))
    );
    table.createTHead().append(head);
    table.createTBody().append(...rows.slice(0, SHOWN));
    const more = rows.length - SHOWN;
    return [table, ...(more > 0 ? [element('p', this.trans.__('and %1 more', more))] : [])];
  }
}

/** What is called so, how it changed, and what is known of it in both; once where that is the same. */
function row(name: string, how: string, told: string[]): HTMLTableRowElement {
  const shown = element('tr');
  shown.dataset.how = how;
  const once = told.length > 1 && told.every(text => text === told[0]);
  const cells = (once ? told.slice(0, 1) : told).map(text => element('td', text, { colSpan: once ? told.length : 1 }));
  shown.append(element('th', name, { scope: 'row' }), element('td', how), ...cells);
  return shown;
}

function isOther({ changed, old, new: young }: IChange): boolean {
  return changed > 0 || old !== young;
}

function part({ path, changed, old, new: young }: IDifference['files'][number]): HTMLTableRowElement {
  const how = young === null ? 'deleted' : old === null ? 'new' : `${size(changed)} changed`;
  return row(path, how, [size(old ?? 0), size(young ?? 0)]);
}
