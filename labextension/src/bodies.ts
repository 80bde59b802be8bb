/** What stands in the dialogs. */

import type { Dialog } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import { Widget } from '@lumino/widgets';
import { isName, NAME_PATTERN } from './names';
import type { ICheck, IError } from './types';

function element<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  text = '',
  properties: Partial<HTMLElementTagNameMap[K]> = {}
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  made.textContent = text;
  return Object.assign(made, properties);
}

/** Some paragraphs of text. */
export class ParagraphsBody extends Widget {
  constructor(paragraphs: string[]) {
    super();
    this.addClass('jp-gpuckpt-Body');
    this.node.append(...paragraphs.filter(text => text).map(text => element('p', text)));
  }
}

/** Why something failed, and what to do next. */
export class ErrorBody extends ParagraphsBody {
  constructor(error: IError, trans: TranslationBundle) {
    super([error.why && trans.__('Why: %1', error.why), error.then && trans.__('Next: %1', error.then)]);
  }
}

/** What the doctor found; what is amiss comes first, with what to do about it. */
export class ChecksBody extends Widget {
  constructor(checks: ICheck[], trans: TranslationBundle) {
    super();
    this.addClass('jp-gpuckpt-Body');
    this.node.tabIndex = 0; // a long list is scrolled by the keyboard, too
    const list = element('dl', '', { className: 'jp-gpuckpt-Checks' });
    for (const check of [...checks].sort((a, b) => Number(a.ok) - Number(b.ok))) {
      list.append(
        element('dt', trans.__('%1: %2', check.name, check.ok ? trans.__('fine') : trans.__('amiss'))),
        element('dd', check.found)
      );
      if (check.mend) {
        list.append(element('dd', check.means), element('dd', trans.__('Next: %1', check.mend)));
      }
    }
    this.node.append(list);
  }
}

export interface ISaveRequest {
  name: string;
  message: string;
  replace: boolean;
}

/** Asks for a snapshot's name and a note, and says at once what is wrong with the name. */
export class SaveBody extends Widget implements Dialog.IBodyWidget<ISaveRequest> {
  private readonly _name: HTMLInputElement;
  private readonly _message: HTMLInputElement;
  private readonly _hint: HTMLElement;

  constructor(
    suggested: string,
    private readonly taken: ReadonlySet<string>,
    private readonly trans: TranslationBundle
  ) {
    super();
    this.addClass('jp-gpuckpt-Body');
    this._name = element('input', '', { id: 'jp-gpuckpt-name', value: suggested, className: 'jp-mod-styled' });
    // The dialog accepts nothing while a field is invalid.
    this._name.required = true;
    this._name.pattern = NAME_PATTERN;
    this._name.setAttribute('aria-describedby', 'jp-gpuckpt-hint');
    this._message = element('input', '', { id: 'jp-gpuckpt-message', className: 'jp-mod-styled' });
    this._hint = element('p', '', { id: 'jp-gpuckpt-hint' });
    this._hint.setAttribute('role', 'status');
    this.node.append(
      element('label', trans.__('Name'), { htmlFor: this._name.id }),
      this._name,
      this._hint,
      element('label', trans.__('Note (optional)'), { htmlFor: this._message.id }),
      this._message,
      element('p', trans.__('The kernel stands still for a moment, and runs on.'))
    );
    this._name.addEventListener('input', () => this._judge());
    this._judge();
  }

  getValue(): ISaveRequest {
    const name = this._name.value;
    return { name, message: this._message.value.trim(), replace: this.taken.has(name) };
  }

  protected override onAfterAttach(): void {
    this._name.select();
  }

  private _judge(): void {
    const { trans } = this;
    const name = this._name.value;
    const refusal = isName(name)
      ? ''
      : trans.__('1 to 100 of the letters a–z and A–Z, digits and . _ -, not . or - as the first.');
    this._hint.textContent =
      refusal || (this.taken.has(name) ? trans.__('This replaces the snapshot of that name.') : '');
  }
}
