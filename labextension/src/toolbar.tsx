/** What stands in a notebook's toolbar beside the save button: the menu of snapshots, and what is under way. */

import { ReactWidget, ToolbarButton } from '@jupyterlab/apputils';
import type { NotebookPanel } from '@jupyterlab/notebook';
import type { TranslationBundle } from '@jupyterlab/translation';
import { caretDownIcon, UseSignal } from '@jupyterlab/ui-components';
import type { CommandRegistry } from '@lumino/commands';
import { Menu } from '@lumino/widgets';
import * as React from 'react';
import { arrange } from './arrange';
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
      const menu = new Menu({ commands });
      menu.title.label = trans.__('Restore');
      const { own } = arrange(model.snapshots, model.notebook, '');
      const newest = own.map(row => row.snapshot).sort((a, b) => b.created.localeCompare(a.created));
      for (const { name } of newest.slice(0, OFFERED)) {
        menu.addItem({ command: CommandIDs.restore, args: { name } });
      }
      if (own.length > 0) {
        menu.addItem({ type: 'separator' });
      }
      menu.addItem({ command: CommandIDs.show });
      menu.aboutToClose.connect(() => requestAnimationFrame(() => menu.dispose()));
      const { left, bottom } = button.node.getBoundingClientRect();
      menu.open(left, bottom);
    }
  });
  return button;
}

/** Says beside the kernel's own indicator that it is being saved or restored. */
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
    const operation = this.model.operationOf(this.panel.sessionContext.session?.kernel?.id);
    if (!operation) {
      return '';
    }
    return operation.kind === 'save' ? this.trans.__('Saving') : this.trans.__('Restoring');
  }
}
