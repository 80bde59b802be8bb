/** What the sidebar says of kernels that sleep or may sleep, and what can be done there. */

import type { TranslationBundle } from '@jupyterlab/translation';
import type { CommandRegistry } from '@lumino/commands';
import * as React from 'react';
import { CommandButton } from './button';
import { ago, moment, seconds, size } from './format';
import { CommandIDs } from './ids';
import type { Model } from './model';
import type { IKernel, State } from './types';

/** After how many idle seconds a kernel may be set to go to sleep; 0 is for never. */
const SPANS = [0, 600, 1800, 3600, 4 * 3600];

interface IProps {
  kernel: IKernel;
  model: Model;
  commands: CommandRegistry;
  trans: TranslationBundle;
}

/** Say what a kernel is doing. */
export function stateText(state: State, trans: TranslationBundle): string {
  return {
    running: trans.__('running'),
    saving: trans.__('being saved'),
    restoring: trans.__('being restored'),
    forking: trans.__('being forked'),
    moving: trans.__('being moved'),
    'falling asleep': trans.__('falling asleep'),
    sleeping: trans.__('asleep'),
    waking: trans.__('waking'),
    hibernating: trans.__('hibernating'),
    hibernated: trans.__('hibernated'),
    ended: trans.__('ended')
  }[state];
}

/** Say in one line what a kernel is doing, and what it holds and has given back. */
export function kernelText(kernel: IKernel, state: State, trans: TranslationBundle): string {
  if (kernel.hibernated) {
    return [stateText(state, trans), trans.__('%1 on the disk', size(kernel.hibernated.size))].join(' · ');
  }
  const parts = [stateText(state, trans), trans.__('%1 memory', size(kernel.memory))];
  if (kernel.gpu_memory !== 0) {
    const held = kernel.gpu_memory === null ? trans.__('unknown') : size(kernel.gpu_memory);
    parts.push(trans.__('%1 on GPUs', held));
  }
  if (kernel.gpu.freed > 0) {
    parts.push(trans.__('%1 freed on GPUs', size(kernel.gpu.freed)));
    parts.push(trans.__('%1 in host memory for it', size(kernel.gpu.host_memory)));
  }
  return parts.join(' · ');
}

/** The buttons of one kernel that put it to sleep and wake it; `of` names it where several have them. */
export function SleepButtons({
  kernel,
  model,
  commands,
  trans,
  of
}: IProps & { of?: string }): React.JSX.Element | null {
  const state = model.stateOf(kernel.kernel_id);
  const args = { kernel: kernel.kernel_id };
  const button = (command: string, label: string, main = false): React.JSX.Element => (
    <CommandButton
      {...{ commands, command, args }}
      className={main ? 'jp-gpuckpt-mod-accept' : ''}
      {...(of === undefined ? {} : { name: trans.__('%1: %2', label, of) })}
    >
      {label}
    </CommandButton>
  );
  if (!['running', 'sleeping', 'hibernated'].includes(state)) {
    return null;
  }
  return (
    <div className="jp-gpuckpt-Row">
      {state !== 'running' && button(CommandIDs.wake, trans.__('Wake'), true)}
      {state === 'running' && model.has('sleep') && button(CommandIDs.sleep, trans.__('Sleep'))}
      {model.has('hibernate') && state !== 'hibernated' && button(CommandIDs.hibernate, trans.__('Hibernate…'))}
    </div>
  );
}

/** When the notebook's kernel fell asleep or was woken, and when it may sleep by itself. */
export function Sleep({ kernel, model, commands, trans }: IProps): React.JSX.Element | null {
  if (!model.has('sleep')) {
    return null;
  }
  const { kernel_id, woken, pinned, sleep_after } = kernel;
  const rests = ['sleeping', 'hibernated'].includes(model.stateOf(kernel_id));
  const asleep = rests ? (kernel.hibernated?.since ?? kernel.asleep_since) : null;
  const after = sleep_after ?? 0;
  const change = (value: string): void =>
    void commands.execute(CommandIDs.sleepAfter, { kernel: kernel_id, seconds: Number(value) });
  return (
    <>
      {asleep !== null ? (
        <p title={moment(asleep)}>
          {kernel.hibernated
            ? trans.__('Hibernated %1; the next cell wakes it.', ago(asleep, new Date()))
            : trans.__('Fell asleep %1; the next cell wakes it.', ago(asleep, new Date()))}
        </p>
      ) : (
        woken !== null && (
          <p title={moment(woken.at)}>
            {trans.__('Woke %1, in %2.', ago(woken.at, new Date()), seconds(woken.seconds))}
          </p>
        )
      )}
      <SleepButtons {...{ kernel, model, commands, trans }} />
      <label className="jp-gpuckpt-Row">
        {trans.__('Sleeps when idle')}
        <select value={after} disabled={pinned} onChange={e => change(e.target.value)}>
          {[...new Set([...SPANS, after])].map(span => (
            <option key={span} value={span}>
              {span === 0 ? trans.__('never') : trans.__('after %1', spanText(span))}
            </option>
          ))}
        </select>
      </label>
      <label className="jp-gpuckpt-Check" title={trans.__('Only you can put it to sleep')}>
        <input
          type="checkbox"
          checked={pinned}
          onChange={() => void commands.execute(CommandIDs.keepAwake, { kernel: kernel_id })}
        />
        {trans.__('Keep awake')}
      </label>
    </>
  );
}

/** Write a number of seconds in the largest unit that has it whole. */
export function spanText(span: number): string {
  const [value, unit] =
    span % 3600 === 0 ? [span / 3600, 'hour'] : span % 60 === 0 ? [span / 60, 'minute'] : [span, 'second'];
  return new Intl.NumberFormat(undefined, { style: 'unit', unit, unitDisplay: 'long' }).format(value);
}
