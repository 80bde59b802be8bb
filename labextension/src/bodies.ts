/** What stands in the dialogs. */

import { Clipboard, type Dialog } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import { Widget } from '@lumino/widgets';
import '../style/dialogs.css';
import { isName, NAME_PATTERN } from './names';
import type { ICheck, IError, ILog } from './types';

/** Make an element with a text and properties. */
export function element<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  text = '',
  properties: Partial<HTMLElementTagNameMap[K]> = {}
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  made.textContent = text;
  return Object.assign(made, properties);
}

/** Make an element with a text, in which what stands between backquotes is shown as what is to be typed. */
function prose<K extends keyof HTMLElementTagNameMap>(tag: K, text: string): HTMLElementTagNameMap[K] {
  const made = element(tag);
  made.append(...text.split(/`([^`]+)`/).map((part, place) => (place % 2 === 1 ? element('code', part) : part)));
  return made;
}

/** Some paragraphs of text. */
export class ParagraphsBody extends Widget {
  constructor(paragraphs: string[]) {
    super();
    this.addClass('jp-gpuckpt-Body');
    this.node.append(...paragraphs.filter(text => text).map(text => prose('p', text)));
  }
}

/** What to type in a terminal, each with what it does and a button that copies it. */
export class CommandsBody extends Widget {
  constructor(intro: string, commands: { command: string; does: string }[], trans: TranslationBundle) {
    super();
    this.addClass('jp-gpuckpt-Body');
    this.addClass('jp-gpuckpt-mod-wide');
    this.node.append(element('p', intro));
    for (const { command, does } of commands) {
      const line = element('div', '', { className: 'jp-gpuckpt-Command' });
      const copy = element('button', trans.__('Copy'), {
        className: 'jp-gpuckpt-Button',
        ariaLabel: trans.__('Copy %1', command)
      });
      copy.addEventListener('click', () => {
        Clipboard.copyToSystem(command);
        copy.textContent = trans.__('Copied');
      });
      line.append(element('code', command), copy);
      this.node.append(line, element('p', does));
    }
  }
}

/** Why something failed, and what to do next. */
export class ErrorBody extends ParagraphsBody {
  constructor(error: IError, trans: TranslationBundle) {
    super([error.why && trans.__('Why: %1', error.why), error.then && trans.__('Next: %1', error.then)]);
  }
}

/** What was found on this machine; problems come first, with what to do about it. */
export class ChecksBody extends Widget {
  constructor(checks: ICheck[], trans: TranslationBundle) {
    super();
    this.addClass('jp-gpuckpt-Body');
    this.node.tabIndex = 0; // a long list is scrolled by the keyboard, too
    const list = element('dl', '', { className: 'jp-gpuckpt-Checks' });
    for (const check of [...checks].sort((a, b) => Number(a.ok) - Number(b.ok))) {
      list.append(
        element('dt', trans.__('%1: %2', check.name, check.ok ? trans.__('OK') : trans.__('problem'))),
        prose('dd', check.found)
      );
      if (check.mend) {
        list.append(prose('dd', check.means), prose('dd', trans.__('Next: %1', check.mend)));
      }
    }
    this.node.append(list);
  }
}

/** What was logged, to be read and scrolled. */
export class LogsBody extends Widget {
  constructor(logs: ILog[], trans: TranslationBundle) {
    super();
    this.addClass('jp-gpuckpt-Body');
    this.addClass('jp-gpuckpt-mod-wide');
    const titles: Record<string, string> = { criu: trans.__('CRIU'), keeper: trans.__('The kernel’s keeper') };
    for (const { name, text } of logs) {
      const title = titles[name] ?? name;
      const log = element('pre', text, { className: 'jp-gpuckpt-Log', tabIndex: 0 });
      log.setAttribute('role', 'region');
      log.setAttribute('aria-label', title);
      this.node.append(element('h3', title), log);
    }
  }
}

/** A field for a snapshot's name, which says at once what is wrong with it. */
class NameField {
  readonly input = element('input', '', { id: 'jp-gpuckpt-name', className: 'jp-mod-styled' });
  readonly hint = element('p', '', { id: 'jp-gpuckpt-hint', className: 'jp-gpuckpt-FieldHint' });

  /** `judge` says what is to be said of an allowed name, and whether it refuses it. */
  constructor(
    name: string,
    private readonly judge: (name: string) => { says: string; refuses: boolean },
    private readonly trans: TranslationBundle
  ) {
    this.input.value = name;
    this.input.setAttribute('aria-describedby', this.hint.id);
    this.hint.setAttribute('role', 'status');
    this.input.addEventListener('input', () => this._judge());
    this._judge();
  }

  get nodes(): HTMLElement[] {
    return [element('label', this.trans.__('Name'), { htmlFor: this.input.id }), this.input, this.hint];
  }

  private _judge(): void {
    const { value } = this.input;
    const { says, refuses } = isName(value)
      ? this.judge(value)
      : {
          says: this.trans.__('Use letters, digits, . _ - (at most 100); start with a letter, digit or _.'),
          refuses: true
        };
    this.hint.textContent = says;
    const { valid } = this.input.validity;
    this.input.setCustomValidity(refuses ? says : '');
    if (valid !== this.input.validity.valid) {
      // The dialog accepts nothing while a field is invalid, but looks before the field has judged itself.
      this.input.dispatchEvent(new Event('input', { bubbles: true }));
    }
  }
}

/** A box to tick, with a line that explains it where there is something to explain. */
class Box {
  readonly input = element('input', '', { type: 'checkbox' });
  readonly nodes: HTMLElement[];

  constructor(id: string, label: string, explained = '') {
    this.input.id = id;
    const line = element('label', '', { className: 'jp-gpuckpt-Box' });
    line.append(this.input, label);
    this.nodes = [line];
    if (explained) {
      const hint = element('p', explained, { id: `${id}-hint` });
      this.input.setAttribute('aria-describedby', hint.id);
      this.nodes.push(hint);
    }
  }
}

export interface ISaveRequest {
  name: string;
  message: string;
  replace: boolean;
  with_files: boolean;
}

/** Asks for a snapshot's name and a note. */
export class SaveBody extends Widget implements Dialog.IBodyWidget<ISaveRequest> {
  private readonly _name: NameField;
  private readonly _message = element('input', '', { id: 'jp-gpuckpt-message', className: 'jp-mod-styled' });
  private readonly _withFiles: Box;

  constructor(
    suggested: string,
    private readonly taken: ReadonlySet<string>,
    withFiles: boolean,
    trans: TranslationBundle
  ) {
    super();
    this.addClass('jp-gpuckpt-Body');
    this._withFiles = new Box(
      'jp-gpuckpt-with-files',
      trans.__('Include Python and its packages'),
      trans.__('It takes longer and more space, and can then be restored where these files differ or are missing.')
    );
    this._withFiles.input.checked = withFiles;
    const replaces = trans.__('This replaces the snapshot of that name.');
    this._name = new NameField(suggested, name => ({ says: taken.has(name) ? replaces : '', refuses: false }), trans);
    this.node.append(
      ...this._name.nodes,
      element('label', trans.__('Note (optional)'), { htmlFor: this._message.id }),
      this._message,
      ...this._withFiles.nodes,
      element('p', trans.__('The kernel is paused for a moment, and then continues.'))
    );
  }

  getValue(): ISaveRequest {
    const name = this._name.input.value;
    return {
      name,
      message: this._message.value.trim(),
      replace: this.taken.has(name),
      with_files: this._withFiles.input.checked
    };
  }

  protected override onAfterAttach(): void {
    this._name.input.select();
  }
}

/** Asks for another name of a snapshot. */
export class NameBody extends Widget implements Dialog.IBodyWidget<string> {
  private readonly _name: NameField;

  constructor(name: string, taken: ReadonlySet<string>, trans: TranslationBundle) {
    super();
    this.addClass('jp-gpuckpt-Body');
    const says = trans.__('There is a snapshot of that name.');
    const judge = (wanted: string): { says: string; refuses: boolean } =>
      wanted !== name && taken.has(wanted) ? { says, refuses: true } : { says: '', refuses: false };
    this._name = new NameField(name, judge, trans);
    this.node.append(...this._name.nodes);
  }

  getValue(): string {
    return this._name.input.value;
  }

  protected override onAfterAttach(): void {
    this._name.input.select();
  }
}

export interface IAddress {
  url: string;
  name: string;
  replace: boolean;
}

/** Asks for an address that snapshots are kept at, and where wanted for the name of one there. */
export class AddressBody extends Widget implements Dialog.IBodyWidget<IAddress> {
  private readonly _url = element('input', '', { id: 'jp-gpuckpt-address', className: 'jp-mod-styled' });
  private readonly _name = element('input', '', { id: 'jp-gpuckpt-name', className: 'jp-mod-styled' });

  private readonly _replace: Box;

  constructor(
    label: string,
    address: string,
    warning: string,
    replace: string,
    trans: TranslationBundle,
    named = false
  ) {
    super();
    this._replace = new Box('jp-gpuckpt-replace', replace);
    this.addClass('jp-gpuckpt-Body');
    this._url.value = address;
    this._url.required = true;
    this._name.pattern = NAME_PATTERN;
    this.node.append(element('label', label, { htmlFor: this._url.id }), this._url);
    if (named) {
      this.node.append(
        element('label', trans.__('Name (optional where there is only one)'), { htmlFor: this._name.id }),
        this._name
      );
    }
    this.node.append(...this._replace.nodes, element('p', warning));
  }

  getValue(): IAddress {
    return { url: this._url.value.trim(), name: this._name.value, replace: this._replace.input.checked };
  }
}

/** What people say of a snapshot; only what is to be changed. */
export interface IDescription {
  message?: string;
  tags?: string[];
}

/** The tag that says that a kernel can be resumed from a snapshot: not for people to change. */
const HIBERNATED = 'hibernated';

/** Asks for a snapshot's note and tags. */
export class DescriptionBody extends Widget implements Dialog.IBodyWidget<IDescription> {
  private readonly _message = element('input', '', { id: 'jp-gpuckpt-message', className: 'jp-mod-styled' });
  private readonly _tags = element('input', '', { id: 'jp-gpuckpt-tags', className: 'jp-mod-styled' });
  private readonly _shown: { message: string; tags: string };

  constructor(
    message: string,
    private readonly tags: readonly string[],
    trans: TranslationBundle
  ) {
    super();
    this.addClass('jp-gpuckpt-Body');
    this._message.value = message;
    this._tags.value = tags.filter(tag => tag !== HIBERNATED).join(' ');
    this._tags.pattern = `\\s*(${NAME_PATTERN}(\\s+|$))*`;
    // A field of one line drops line breaks: what it shows is what it is compared with.
    this._shown = { message: this._message.value, tags: this._tags.value };
    const hint = element('p', trans.__('Separated by spaces: letters, digits, and . _ -'), {
      id: 'jp-gpuckpt-hint',
      className: 'jp-gpuckpt-FieldHint'
    });
    this._tags.setAttribute('aria-describedby', hint.id);
    this.node.append(
      element('label', trans.__('Note'), { htmlFor: this._message.id }),
      this._message,
      element('label', trans.__('Tags'), { htmlFor: this._tags.id }),
      this._tags,
      hint
    );
  }

  getValue(): IDescription {
    const [message, tags] = [this._message.value, this._tags.value];
    const kept = this.tags.filter(tag => tag === HIBERNATED);
    return {
      ...(message === this._shown.message ? {} : { message: message.trim() }),
      ...(tags === this._shown.tags ? {} : { tags: [...kept, ...tags.split(/\s+/).filter(tag => tag)] })
    };
  }
}

/** Which snapshots will be removed and which stay. */
export class RemovalBody extends ParagraphsBody {
  constructor(going: string[], staying: string[], freed: string, trans: TranslationBundle) {
    super([
      trans._n(
        'It will be gone for good. That frees %2.',
        'They will be gone for good. Together that frees %2.',
        going.length,
        freed
      ),
      staying.length ? trans.__('Not removed, because pinned or already gone: %1.', staying.join(', ')) : ''
    ]);
    const list = element('ul', '', { className: 'jp-gpuckpt-Names', tabIndex: 0 });
    list.setAttribute('aria-label', trans.__('Snapshots that will be removed'));
    list.append(...going.map(name => element('li', name)));
    this.node.prepend(list);
  }
}

export interface IImport {
  file: File | null;
  replace: boolean;
}

/** Asks for a file with a snapshot. */
export class ImportBody extends Widget implements Dialog.IBodyWidget<IImport> {
  private readonly _file = element('input', '', {
    id: 'jp-gpuckpt-file',
    type: 'file',
    accept: '.gpuckpt',
    required: true
  });
  private readonly _replace: Box;

  constructor(trans: TranslationBundle) {
    super();
    this.addClass('jp-gpuckpt-Body');
    this._replace = new Box('jp-gpuckpt-replace', trans.__('Replace another snapshot of that name here'));
    const label = prose('label', trans.__('A file written by “Export” or `jupyter gpuckpt export`'));
    label.htmlFor = this._file.id;
    this.node.append(
      label,
      this._file,
      ...this._replace.nodes,
      element('p', trans.__('A restored snapshot is a program that runs as you: import only what you trust.'))
    );
  }

  getValue(): IImport {
    return { file: this._file.files?.[0] ?? null, replace: this._replace.input.checked };
  }
}

/** Asks whether somebody's key is to be trusted, and whose it is. */
export class TrustBody extends Widget implements Dialog.IBodyWidget<string> {
  private readonly _comment = element('input', '', { id: 'jp-gpuckpt-whose', className: 'jp-mod-styled' });

  constructor(key: string, trans: TranslationBundle) {
    super();
    this.addClass('jp-gpuckpt-Body');
    this.node.append(
      element('p', trans.__('The snapshot was signed with a key that is neither yours nor one that you trust:')),
      element('code', key, { className: 'jp-gpuckpt-Key' }),
      element('p', trans.__('A restored snapshot is a program that runs as you, with your files and passwords.')),
      prose(
        'p',
        trans.__(
          'Ask its maker what `jupyter gpuckpt trust --own` prints there. Only if it is this key, trust it: whatever it has signed is accepted from then on.'
        )
      ),
      element('label', trans.__('Whose key it is (optional)'), { htmlFor: this._comment.id }),
      this._comment
    );
  }

  getValue(): string {
    return this._comment.value.trim();
  }
}

/** Asks for the passphrase that an encrypted file is opened with. */
export class PassphraseBody extends Widget implements Dialog.IBodyWidget<string> {
  private readonly _passphrase = element('input', '', {
    id: 'jp-gpuckpt-passphrase',
    className: 'jp-mod-styled',
    type: 'password',
    autocomplete: 'off',
    required: true
  });

  constructor(file: string, isAgain: boolean, trans: TranslationBundle) {
    super();
    this.addClass('jp-gpuckpt-Body');
    const hint = element('p', isAgain ? trans.__('That passphrase does not open it.') : '', {
      id: 'jp-gpuckpt-hint',
      className: 'jp-gpuckpt-FieldHint'
    });
    hint.setAttribute('role', 'status');
    this._passphrase.setAttribute('aria-describedby', hint.id);
    this.node.append(
      element('p', trans.__('%1 is encrypted. Ask whoever exported it for the passphrase.', file)),
      element('label', trans.__('Passphrase'), { htmlFor: this._passphrase.id }),
      this._passphrase,
      hint
    );
  }

  getValue(): string {
    return this._passphrase.value;
  }
}
