/** A button that does a command: it says what for and by which keys, and why it cannot be pressed where that is so. */

import { CommandRegistry } from '@lumino/commands';
import type { ReadonlyPartialJSONObject } from '@lumino/coreutils';
import * as React from 'react';
import { tellInPassing } from './passing';

interface IProps {
  commands: CommandRegistry;
  command: string;
  args?: ReadonlyPartialJSONObject;
  className?: string;
  tabIndex?: number;
  /** What it is called where its text says too little. */
  name?: string;
  children: React.ReactNode;
}

/** Do a command, or say why it cannot be done now: that is the caption of one that is disabled. */
export function perform(commands: CommandRegistry, command: string, args?: ReadonlyPartialJSONObject): void {
  if (commands.isEnabled(command, args)) {
    void commands.execute(command, args);
  } else {
    tellInPassing(commands.caption(command, args), 'info');
  }
}

/** It can have the focus also where it cannot be pressed, so that everybody hears why. */
export function CommandButton(props: IProps): React.JSX.Element {
  const { commands, command, args, className = '', tabIndex, name, children } = props;
  const id = React.useId();
  const caption = commands.caption(command, args);
  const refused = !commands.isEnabled(command, args);
  const keys = args === undefined ? keysOf(commands, command) : '';
  return (
    <>
      <button
        className={`jp-gpuckpt-Button ${className}`}
        title={!refused && keys ? `${caption} (${keys})` : caption}
        tabIndex={tabIndex}
        aria-label={name}
        aria-disabled={refused || undefined}
        aria-describedby={refused ? id : undefined}
        onClick={() => perform(commands, command, args)}
      >
        {children}
      </button>
      {refused && (
        <span id={id} className="jp-gpuckpt-Why">
          {caption}
        </span>
      )}
    </>
  );
}

function keysOf(commands: CommandRegistry, command: string): string {
  const binding = commands.keyBindings.find(found => found.command === command);
  return binding ? CommandRegistry.formatKeystroke(binding.keys) : '';
}
