/** What stands in a notebook's toolbar beside the save button: the menu of snapshots, and what is under way. */

import { ReactWidget, ToolbarButton } from '@jupyterlab/apputils';
import type { NotebookPanel } from '@jupyterlab/notebook';
import type { TranslationBundle } from '@jupyterlab/translation';
import { caretDownIcon, UseSignal } from '@jupyterlab/ui-components';
import type { CommandRegistry } from '@lumino/commands';
import type { Menu } from '@lumino/widgets';
import * as React from 'react';
import { arrange } from './arrange';
import { openMenu } from './commands';
import { CommandIDs } from './ids';
import type { Model } from './model';

/** How many snapshots the menu offers; the sidebar has them all. */
const OFFERED = 10;

/** Return the button that opens a menu of the notebook's latest snapshots, to restore one. */
export function restoreButton(model: Model, commands: CommandRegistry, trans: TranslationBundle): ToolbarButton {
  const button = new ToolbarButton({
    icon: caretDownIcon,
    tooltip: trans.__('Restore a snapshot of this kernel'),
    onClick: () => {
      const own = arrange(model.snapshots, model.notebook, '').own.map(row => row.snapshot);
      const newest = own.sort((a, b) => b.created.localeCompare(a.created)).slice(0, OFFERED);
      const items: Menu.IItemOptions[] = newest.map(({ name }) => ({ command: CommandIDs.restore, args: { name } }));
      if (items.length > 0) {
        items.push({ type: 'separator' });
      }
      openMenu(commands, button.node, trans.__('Restore'), [
        ...items,
        { command: CommandIDs.fork },
        { command: CommandIDs.show }
      ]);
    }
  });
  return button;
}

/** Says in place of the kernel's own indicator that it is being saved, restored, forked or moved. */
export class Indicator extends ReactWidget {
  constructor(
    private readonly panel: NotebookPanel,
    private readonly model: Model,
    private readonly trans: TranslationBundle
  ) {
    super();
    this.addClass('jp-gpuckpt-Indicator');
  }

  protected override render(): React.JSX.Element {
    return <UseSignal signal={this.model.changed}>{() => <span role="status">{this._text()}</span>}</UseSignal>;
  }

  private _text(): string {
    const state = this.model.stateOf(this.panel.sessionContext.session?.kernel?.id);
    // The style hides the kernel's own indicator meanwhile, which knows of neither.
    this.panel.toolbar.node.dataset.gpuckpt = state;
    const { trans } = this;
    return {
      running: '',
      saving: trans.__('Saving'),
      restoring: trans.__('Restoring'),
      forking: trans.__('Forking'),
      moving: trans.__('Moving'),
      ended: ''
    }[state];
  }
}
