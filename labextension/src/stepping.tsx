/** What the sidebar offers of undo, redo and automatic saves. */

import type { TranslationBundle } from '@jupyterlab/translation';
import { redoIcon, undoIcon } from '@jupyterlab/ui-components';
import type { CommandRegistry } from '@lumino/commands';
import * as React from 'react';
import { CommandButton, perform } from './button';
import { size } from './format';
import { CommandIDs } from './ids';
import type { Model } from './model';
import { spanText } from './sleeping';
import { savesItself } from './steps';
import type { IAutoSaving, IKernel } from './types';

interface IProps {
  kernel: IKernel;
  model: Model;
  commands: CommandRegistry;
  trans: TranslationBundle;
}

/** The buttons that undo and redo cells, and whether there is a save after each; nothing where the server has none. */
export function Stepping({ kernel, model, commands, trans }: IProps): React.JSX.Element | null {
  if (!model.has('undo')) {
    return null;
  }
  const { auto } = kernel;
  return (
    <>
      <div className="jp-gpuckpt-Row">
        <CommandButton {...{ commands }} command={CommandIDs.undo}>
          <undoIcon.react tag={null} />
          {trans.__('Undo cell')}
        </CommandButton>
        <CommandButton {...{ commands }} command={CommandIDs.redo}>
          <redoIcon.react tag={null} />
          {trans.__('Redo cell')}
        </CommandButton>
      </div>
      <label className="jp-gpuckpt-Check" title={commands.caption(CommandIDs.auto)}>
        <input type="checkbox" checked={savesItself(kernel)} onChange={() => perform(commands, CommandIDs.auto)} />
        {whenText(auto, trans)}
        {auto && (
          <span className="jp-gpuckpt-Rule" title={ruleText(auto, trans)}>
            {trans.__('keeps %1', auto.keep)}
          </span>
        )}
      </label>
      {auto?.failed && (
        <details className="jp-gpuckpt-Failed">
          <summary>{trans.__('The last automatic save failed')}</summary>
          {auto.failed}
        </details>
      )}
    </>
  );
}

function whenText(auto: IAutoSaving | undefined, trans: TranslationBundle): string {
  if (auto?.every) {
    return trans.__('Save every %1, also in a cell', spanText(auto.every));
  }
  return auto?.after
    ? trans.__('Save after cells of %1 or longer', spanText(auto.after))
    : trans.__('Save after each cell');
}

/** Say which of the automatic snapshots are kept. */
function ruleText({ keep, under }: IAutoSaving, trans: TranslationBundle): string {
  return under === null
    ? trans.__('The newest %1 of these snapshots are kept', keep)
    : trans.__('The newest %1 of these snapshots are kept, fewer while all take more than %2', keep, size(under));
}
