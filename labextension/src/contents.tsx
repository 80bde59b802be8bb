/** The list of snapshots and kernels in the sidebar. Loaded when it is first shown. */

import type { TranslationBundle } from '@jupyterlab/translation';
import { deleteIcon } from '@jupyterlab/ui-components';
import type { CommandRegistry } from '@lumino/commands';
import type { ReadonlyPartialJSONObject } from '@lumino/coreutils';
import * as React from 'react';
import '../style/sidebar.css';
import { arrange, drawn, inBackground, isHibernated, isOf, type IRow } from './arrange';
import { CommandButton, perform } from './button';
import { openMenu, SNAPSHOT_COMMANDS } from './commands';
import type { Follower } from './follow';
import { ago, basename, moment, size } from './format';
import { CommandIDs } from './ids';
import type { Model } from './model';
import { Moon } from './moon';
import { amountText, stepText } from './progress';
import { Room } from './room';
import { extended, toggled, type Chosen } from './selection';
import { kernelText, Sleep, SleepButtons } from './sleeping';
import { Stepping } from './stepping';
import type { IError, IKernel, INotebook, ISnapshot } from './types';

/** What the keys do with the snapshot whose line has the focus; Enter brings it back. */
const KEYS: Record<string, string> = {
  F2: CommandIDs.rename,
  Delete: CommandIDs.remove
};
/** How many lines of a list are drawn at first, and with each wish for more: a thousand would take too long. */
const PAGE = 100;
/** Branches of branches that lie deeper are drawn at this depth; the sidebar is narrow. */
const DEEPEST = 6;

export interface IProps {
  model: Model;
  follower: Follower;
  commands: CommandRegistry;
  trans: TranslationBundle;
}

/** Which snapshots are chosen, and a way to choose others. */
interface IChoice {
  chosen: Chosen;
  choose: (chosen: Chosen) => void;
}

/** All that the sidebar shows. */
export default function Contents(props: IProps): React.JSX.Element {
  const { model, trans } = props;
  const [marked, choose] = React.useState<Chosen>(new Set());
  const chosen = React.useMemo(
    () => new Set(model.snapshots.map(({ id }) => id).filter(id => marked.has(id))),
    [model.snapshots, marked]
  );
  const [search, setSearch] = React.useState('');
  const [showsAll, setShowsAll] = React.useState(false);
  const here = model.kernel?.parent?.id;
  const automatic = React.useMemo(
    () => inBackground(model.snapshots, model.notebook, here),
    [model.snapshots, model.notebook, here]
  );
  const rows = React.useMemo(
    () => arrange(model.snapshots, model.notebook, search, showsAll || search ? [] : automatic),
    [model.snapshots, model.notebook, search, showsAll, automatic]
  );
  if (model.problem !== null) {
    return <Blank error={model.problem} {...props} />;
  }
  if (!model.loaded) {
    return <p className="jp-gpuckpt-Hint">{trans.__('Asking the server …')}</p>;
  }
  return (
    <>
      <KernelBox {...props} />
      {model.snapshots.length > 0 && (
        <input
          type="search"
          className="jp-mod-styled jp-gpuckpt-Search"
          placeholder={trans.__('Search snapshots')}
          aria-label={trans.__('Search snapshots')}
          value={search}
          onChange={event => setSearch(event.target.value)}
        />
      )}
      {model.faults.map(fault => (
        <p className="jp-gpuckpt-Fault" key={fault.what} title={`${fault.why} ${fault.then}`}>
          {fault.what}
        </p>
      ))}
      {model.notebook !== null && (
        <List
          title={trans.__('This notebook')}
          aside={
            automatic.length > 0 &&
            !search && (
              <button
                className="jp-gpuckpt-Aside"
                aria-pressed={showsAll}
                title={trans.__('Show what was saved by itself after cells')}
                onClick={() => {
                  setShowsAll(!showsAll);
                  choose(new Set()); // nothing is removed that is not seen
                }}
              >
                {trans.__('%1 automatic', automatic.length)}
              </button>
            )
          }
          empty={
            search
              ? trans.__('No snapshot of this notebook matches.')
              : trans.__(
                  'No snapshots of this notebook yet. Save its kernel here, or with “%gpuckpt save NAME” in a cell.'
                )
          }
          key={`${model.notebook.path} ${search}`}
          rows={rows.own}
          {...{ chosen, choose }}
          {...props}
        />
      )}
      {(rows.others.length > 0 || model.notebook === null) && (
        <List
          title={model.notebook === null ? trans.__('All snapshots') : trans.__('Other notebooks and jobs')}
          empty={search ? trans.__('None fits.') : trans.__('No snapshots yet.')}
          key={search}
          rows={rows.others}
          {...{ chosen, choose }}
          {...props}
        />
      )}
      <div className="jp-gpuckpt-Row jp-gpuckpt-FromElsewhere">
        {model.has('pull') && (
          <button className="jp-gpuckpt-Button" onClick={() => void props.commands.execute(CommandIDs.fetch)}>
            {trans.__('Pull a snapshot…')}
          </button>
        )}
        {model.has('import') && (
          <button className="jp-gpuckpt-Button" onClick={() => void props.commands.execute(CommandIDs.import)}>
            {trans.__('Import a file…')}
          </button>
        )}
      </div>
      <OtherKernels {...props} />
      <Foot {...{ chosen, choose }} {...props} />
    </>
  );
}

function Blank({ error, model, commands, trans }: IProps & { error: IError }): React.JSX.Element {
  return (
    <div className="jp-gpuckpt-Kernel">
      <strong>{error.what}</strong>
      <p>{error.why}</p>
      <p>{error.then}</p>
      {error === model.problem ? (
        <button className="jp-gpuckpt-Button" onClick={() => model.refresh()}>
          {trans.__('Try again')}
        </button>
      ) : (
        <button className="jp-gpuckpt-Button" onClick={() => void commands.execute(CommandIDs.doctor)}>
          {trans.__('Check this machine')}
        </button>
      )}
    </div>
  );
}

/** Where the notebook's kernel is and what it holds, or why it cannot be saved and what to do about it. */
function KernelBox(props: IProps): React.JSX.Element {
  const { model, commands, trans } = props;
  const change = (
    <button className="jp-gpuckpt-Button" onClick={() => void commands.execute('notebook:change-kernel')}>
      {trans.__('Change the kernel…')}
    </button>
  );
  if (model.notebook === null) {
    return model.unavailable ? (
      <Blank error={model.unavailable} {...props} />
    ) : (
      <p className="jp-gpuckpt-Hint">{trans.__('Open a notebook to save its kernel, or to restore one.')}</p>
    );
  }
  if (model.notebook.kernelId === null) {
    return (
      <div className="jp-gpuckpt-Kernel">
        <strong>{trans.__('This notebook has no kernel.')}</strong>
        <p>{trans.__('Choose “Python 3 (gpuckpt)”; then it can be saved and restored.')}</p>
        {change}
      </div>
    );
  }
  if (model.kernel) {
    return <SavableKernel kernel={model.kernel} {...props} />;
  }
  if (model.unavailable) {
    return <Blank error={model.unavailable} {...props} />;
  }
  return (
    <div className="jp-gpuckpt-Kernel">
      <strong>{model.plain ? model.plain.why.what : trans.__('The kernel is starting.')}</strong>
      {model.plain && <p>{model.plain.why.why}</p>}
      {model.plain && <p>{model.plain.why.then}</p>}
      {model.plain && change}
    </div>
  );
}

function SavableKernel({ kernel, model, follower, commands, trans }: IProps & { kernel: IKernel }): React.JSX.Element {
  const operation = model.operationOf(kernel.kernel_id);
  const state = model.stateOf(kernel.kernel_id);
  const sleep = <Sleep {...{ kernel, model, commands, trans }} />;
  // What takes the place of the buttons takes as much room, so that nothing below moves.
  const place = React.useRef<HTMLDivElement>(null);
  const height = React.useRef(0);
  React.useLayoutEffect(() => {
    if (!operation) {
      height.current = place.current?.offsetHeight ?? 0;
    }
  });
  return (
    <div className="jp-gpuckpt-Kernel">
      <strong>
        {basename(model.notebook?.path ?? '')}
        <Moon state={state} />
      </strong>
      <p>
        {trans.__('Kernel: %1', kernelText(kernel, state, trans))}
        <br />
        {basedOn(kernel, model, trans)}
      </p>
      <Stepping {...{ kernel, model, commands, trans }} />
      <div ref={place} className="jp-gpuckpt-Doing" style={operation && { minHeight: height.current }}>
        {operation ? (
          <>
            <p>
              <span role="status">{stepText(operation, trans)}</span>
              <span aria-hidden="true"> {amountText(operation, trans)}</span>
            </p>
            <progress
              aria-label={stepText(operation, trans)}
              {...(operation.percent === null ? {} : { max: 100, value: operation.percent })}
            />
            <button
              className="jp-gpuckpt-Button"
              disabled={operation.cancelling}
              onClick={() => void follower.cancel(operation.id)}
            >
              {trans.__('Cancel')}
            </button>
          </>
        ) : (
          <>
            {state !== 'running' && sleep}
            <CommandButton
              {...{ commands }}
              command={CommandIDs.save}
              className={state === 'running' ? 'jp-gpuckpt-mod-accept' : ''}
            >
              {trans.__('Save the kernel…')}
            </CommandButton>
            {model.has('fork') && (
              <CommandButton {...{ commands }} command={CommandIDs.fork}>
                {trans.__('Fork into a new notebook')}
              </CommandButton>
            )}
            {state === 'running' && sleep}
          </>
        )}
      </div>
    </div>
  );
}

/** Say which snapshot a kernel last came from or went to, or else of which kernel it is a copy. */
function basedOn(kernel: IKernel, model: Model, trans: TranslationBundle): string {
  // It may have another name by now.
  const parent = model.snapshots.find(({ id }) => id === kernel.parent?.id)?.label ?? kernel.parent?.name;
  if (parent) {
    return trans.__('Based on %1', parent);
  }
  if (!kernel.copy_of) {
    return trans.__('Fresh kernel');
  }
  const original = model.kernels.find(({ kernel_id }) => kernel_id === kernel.copy_of);
  return original?.notebook ? trans.__('Fork of %1', basename(original.notebook)) : trans.__('Fork of another kernel');
}

/** The kernels of other notebooks, with what they hold: GPU memory is shared by all. */
function OtherKernels({ model, follower, commands, trans }: IProps): React.JSX.Element | null {
  const others = model.kernels.filter(kernel => kernel.kernel_id !== model.notebook?.kernelId);
  if (others.length === 0) {
    return null;
  }
  const adopt = (id: string): void =>
    void model.api
      .adopt(id)
      .catch(reason => follower.complain(reason))
      .then(() => model.refresh());
  return (
    <section className="jp-gpuckpt-Section">
      <h3>{trans.__('Other kernels')}</h3>
      <ul className="jp-gpuckpt-Kernels" aria-label={trans.__('Other kernels')}>
        {others.map(kernel => (
          <li key={kernel.kernel_id} title={kernel.notebook}>
            <span>
              {basename(kernel.notebook) || kernel.name}
              <Moon state={model.stateOf(kernel.kernel_id)} />
            </span>
            <span>{kernelText(kernel, model.stateOf(kernel.kernel_id), trans)}</span>
            <SleepButtons {...{ kernel, model, commands, trans }} of={basename(kernel.notebook) || kernel.name} />
            {!kernel.attended && kernel.state === 'running' && (
              <button
                className="jp-gpuckpt-Button"
                title={trans.__('No server holds this kernel. This one will, and notebooks can choose it.')}
                onClick={() => adopt(kernel.kernel_id)}
              >
                {trans.__('Adopt')}
              </button>
            )}
          </li>
        ))}
      </ul>
    </section>
  );
}

/** What is chosen and can be done with it, and the room that the snapshots take. */
function Foot({ chosen, choose, model, commands, trans }: IProps & IChoice): React.JSX.Element | null {
  const node = React.useRef<HTMLDivElement>(null);
  const isThere = model.store !== null || chosen.size > 0;
  React.useEffect(() => {
    const [foot, sidebar] = [node.current, node.current?.parentElement];
    const observer = new ResizeObserver(() =>
      sidebar?.style.setProperty('--jp-gpuckpt-foot', `${foot?.offsetHeight ?? 0}px`)
    );
    if (foot !== null) {
      observer.observe(foot);
    }
    return () => observer.disconnect();
  }, [isThere]);
  if (!isThere) {
    return null;
  }
  const names = model.snapshots.filter(({ id }) => chosen.has(id)).map(({ name }) => name);
  return (
    <div ref={node} className="jp-gpuckpt-Foot">
      <div className="jp-gpuckpt-Chosen" hidden={names.length === 0}>
        <span role="status">{names.length > 0 && trans._n('%1 selected', '%1 selected', names.length)}</span>
        <button
          className="jp-gpuckpt-Button"
          aria-label={trans._n('Remove %1 selected snapshot', 'Remove %1 selected snapshots', names.length)}
          onClick={() => void commands.execute(CommandIDs.removeAll, { names })}
        >
          {trans.__('Remove…')}
        </button>
        <button className="jp-gpuckpt-Button" onClick={() => choose(new Set())}>
          {trans.__('Clear')}
        </button>
      </div>
      {model.store !== null && <Room store={model.store} kernel={model.kernel} trans={trans} />}
    </div>
  );
}

interface IListProps extends IProps, IChoice {
  title: string;
  /** Stands beside the title. */
  aside?: React.ReactNode;
  /** Stands there where there are no rows. */
  empty: string;
  rows: IRow[];
}

function List(props: IListProps): React.JSX.Element {
  const { title, empty, chosen, choose, model, trans } = props;
  const [active, setActive] = React.useState(0);
  const [limit, setLimit] = React.useState(PAGE);
  const tree = React.useRef<HTMLUListElement>(null);
  const rows = drawn(props.rows, limit, model.kernel?.parent?.id);
  const hidden = props.rows.length - rows.length;
  /** Where a range of chosen ones begins. */
  const anchor = React.useRef<string | null>(null);
  const order = rows.map(({ snapshot }) => snapshot.id);
  const mark = (id: string, range: boolean): void => {
    choose(range ? extended(chosen, order, anchor.current, id) : toggled(chosen, id));
    anchor.current = id;
  };
  const focus = (place: number): void => {
    const to = Math.max(0, Math.min(rows.length - 1, place));
    setActive(to);
    (tree.current?.children[to] as HTMLElement | undefined)?.focus();
  };
  const onKeyDown = (event: React.KeyboardEvent): void => {
    const at = [...event.currentTarget.children].indexOf(event.target as Element);
    const places: Record<string, number> = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1 };
    const place = places[event.key];
    if (at >= 0 && place !== undefined) {
      event.preventDefault();
      focus(place);
      const [from, to] = [order[at], order[Math.max(0, Math.min(order.length - 1, place))]];
      if (event.shiftKey && from !== undefined && to !== undefined) {
        choose(extended(chosen, order, from, to));
        anchor.current = to;
      }
    } else if (at >= 0 && event.key === 'a' && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      choose(new Set([...chosen, ...order]));
    } else if (event.key === 'Escape' && chosen.size > 0) {
      event.preventDefault();
      choose(new Set());
    }
  };
  // Whoever asked for more by the keyboard goes on with the first that has come.
  const shown = React.useRef(limit);
  React.useEffect(() => {
    if (shown.current !== limit) {
      focus(shown.current);
      shown.current = limit;
    }
  });
  return (
    <section className="jp-gpuckpt-Section">
      <div className="jp-gpuckpt-Head">
        <h3>
          {title}
          {props.rows.length > 0 && <span>{props.rows.length}</span>}
        </h3>
        {props.aside}
      </div>
      {rows.length === 0 ? (
        <p className="jp-gpuckpt-Hint">{empty}</p>
      ) : (
        <ul
          ref={tree}
          role="tree"
          aria-label={title}
          aria-multiselectable="true"
          className={chosen.size > 0 ? 'jp-gpuckpt-mod-choosing' : undefined}
          onKeyDown={onKeyDown}
        >
          {rows.map((row, place) => (
            <Line
              key={row.snapshot.id}
              row={row}
              active={place === Math.min(active, rows.length - 1)}
              place={props.rows.indexOf(row)}
              of={props.rows.length}
              onFocus={() => setActive(place)}
              onMark={range => mark(row.snapshot.id, range)}
              {...props}
            />
          ))}
        </ul>
      )}
      {hidden > 0 && (
        <button className="jp-gpuckpt-Button jp-gpuckpt-Older" onClick={() => setLimit(limit + PAGE)}>
          {hidden > PAGE ? trans.__('Show %1 older of %2', PAGE, hidden) : trans.__('Show %1 older', hidden)}
        </button>
      )}
    </section>
  );
}

interface ILineProps extends IProps, IChoice {
  row: IRow;
  active: boolean;
  /** Its place among all rows of its list, drawn or not. */
  place: number;
  of: number;
  onFocus: () => void;
  /** Called where it is to be chosen or no longer, or with all from the one before. */
  onMark: (range: boolean) => void;
}

function Line(props: ILineProps): React.JSX.Element {
  const { row, active, place, of, chosen, onFocus, onMark, model, commands, trans } = props;
  const { snapshot, depth, origin, first } = row;
  const { name, label, message } = snapshot;
  /** It is called by the cell that it was saved after: its name is but a number. */
  const automatic = Boolean(snapshot.automatic && message);
  const here = model.kernel?.parent?.id === snapshot.id;
  const told = about(snapshot, origin, model.notebook, trans);
  const back = wayBack(snapshot, model.wakesFrom(snapshot), trans);
  const tab = active ? 0 : -1;
  const onKeyDown = (event: React.KeyboardEvent): void => {
    if (event.target !== event.currentTarget) {
      return;
    }
    const command = KEYS[event.key];
    if (event.key === ' ') {
      event.preventDefault();
      onMark(false);
    } else if (command === CommandIDs.remove && chosen.size > 1 && chosen.has(snapshot.id)) {
      event.preventDefault();
      const names = model.snapshots.filter(({ id }) => chosen.has(id)).map(other => other.name);
      void commands.execute(CommandIDs.removeAll, { names });
    } else if (event.key === 'Enter') {
      event.preventDefault();
      perform(commands, back.command, back.args);
    } else if (command !== undefined) {
      event.preventDefault();
      perform(commands, command, { name });
    }
  };
  const isOnText = (event: React.MouseEvent): boolean => !(event.target as Element).closest('button, input');
  const onClick = (event: React.MouseEvent): void => {
    if ((event.ctrlKey || event.metaKey || event.shiftKey) && isOnText(event)) {
      onMark(event.shiftKey);
    }
  };
  const onDoubleClick = (event: React.MouseEvent): void => {
    if (isOnText(event)) {
      perform(commands, back.command, back.args);
    }
  };
  /** Text would be marked from where the last click was. */
  const onMouseDown = (event: React.MouseEvent<HTMLElement>): void => {
    if (event.shiftKey) {
      event.preventDefault();
      event.currentTarget.focus();
    }
  };
  const onMore = (event: React.MouseEvent<HTMLElement>): void =>
    openMenu(
      commands,
      event.currentTarget,
      label,
      SNAPSHOT_COMMANDS.map(command => (command ? { command, args: { name } } : { type: 'separator' }))
    );
  return (
    <li
      role="treeitem"
      className={`jp-gpuckpt-Line${first ? ' jp-mod-first' : ''}`}
      data-snapshot={name}
      aria-posinset={place + 1}
      aria-setsize={of}
      aria-current={here ? 'true' : undefined}
      aria-selected={chosen.has(snapshot.id)}
      tabIndex={tab}
      style={{ paddingLeft: `${8 + 12 * Math.min(depth, DEEPEST)}px` }}
      onFocus={onFocus}
      onKeyDown={onKeyDown}
      onClick={onClick}
      onDoubleClick={onDoubleClick}
      onMouseDown={onMouseDown}
    >
      <input
        type="checkbox"
        className="jp-gpuckpt-Choose"
        tabIndex={-1} // Space on the line does the same
        aria-label={trans.__('Select %1', label)}
        checked={chosen.has(snapshot.id)}
        onMouseDown={event => event.preventDefault()} // the focus stays: what moves with it would move the box
        onChange={event => onMark((event.nativeEvent as MouseEvent).shiftKey)}
      />
      <div className="jp-gpuckpt-Name">
        {automatic ? <code title={message}>{message}</code> : <span title={label}>{label}</span>}
        {here && <em>{trans.__('here')}</em>}
        {snapshot.job && <em>{trans.__('job %1', snapshot.job)}</em>}
        {snapshot.pinned && <em>{trans.__('pinned')}</em>}
        {snapshot.tags.map(tag => (
          <em key={tag}>{tag}</em>
        ))}
      </div>
      {!automatic && message && (
        <div className="jp-gpuckpt-Message" title={message}>
          {message}
        </div>
      )}
      <div className="jp-gpuckpt-About" title={`${moment(snapshot.created)} · ${told}`}>
        {told}
      </div>
      <div className="jp-gpuckpt-Buttons">
        <CommandButton {...{ commands }} command={back.command} args={back.args} tabIndex={tab} name={back.name}>
          {back.text}
        </CommandButton>
        <CommandButton
          {...{ commands }}
          command={CommandIDs.remove}
          args={{ name }}
          className="jp-gpuckpt-mod-icon"
          tabIndex={tab}
          name={trans.__('Remove %1', label)}
        >
          <deleteIcon.react tag={null} />
        </CommandButton>
        <button
          className="jp-gpuckpt-Button"
          tabIndex={tab}
          aria-haspopup="menu"
          aria-label={trans.__('More about %1', label)}
          title={trans.__('More')}
          onClick={onMore}
        >
          ⋯
        </button>
      </div>
    </li>
  );
}

/** What brings a snapshot back, and how that is called: the kernel it is of may only have to be woken for it. */
function wayBack(
  snapshot: ISnapshot,
  held: IKernel | undefined,
  trans: TranslationBundle
): { command: string; args: ReadonlyPartialJSONObject; text: string; name: string } {
  const { name, label, job } = snapshot;
  const args = { name };
  if (isHibernated(snapshot)) {
    return held
      ? {
          command: CommandIDs.wake,
          args: { kernel: held.kernel_id },
          text: trans.__('Wake'),
          name: trans.__('Wake the kernel of %1', label)
        }
      : { command: CommandIDs.resume, args, text: trans.__('Resume'), name: trans.__('Resume %1', label) };
  }
  return job
    ? {
        command: CommandIDs.restoreJob,
        args,
        text: trans.__('Restore…'),
        name: trans.__('Restore… %1 as a job', label)
      }
    : { command: CommandIDs.restore, args, text: trans.__('Restore'), name: trans.__('Restore %1', label) };
}

function about(snapshot: ISnapshot, origin: string, notebook: INotebook | null, trans: TranslationBundle): string {
  const named = snapshot.automatic && snapshot.message ? [snapshot.label] : [];
  const parts = [...named, ago(snapshot.created, new Date()), size(snapshot.size)];
  if (snapshot.gpu_memory > 0) {
    parts.push(trans.__('%1 on GPUs', size(snapshot.gpu_memory)));
  }
  if (snapshot.notebook && !isOf(snapshot, notebook)) {
    parts.push(basename(snapshot.notebook));
  }
  if (origin) {
    parts.push(trans.__('from %1', origin));
  }
  return parts.join(' · ');
}
