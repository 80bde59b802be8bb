/** What stands in a notebook's toolbar beside the save button: the menu of snapshots, and what is under way. */

import { ReactWidget, ToolbarButton } from '@jupyterlab/apputils';
import type { NotebookPanel } from '@jupyterlab/notebook';
import type { TranslationBundle } from '@jupyterlab/translation';
import { caretDownIcon, UseSignal } from '@jupyterlab/ui-components';
import type { CommandRegistry } from '@lumino/commands';
import type { Menu } from '@lumino/widgets';
import * as React from 'react';
import { isOf } from './arrange';
import { openMenu } from './commands';
import { seconds } from './format';
import { CommandIDs } from './ids';
import type { Model } from './model';
import { Moon } from './moon';
import type { State } from './types';

/** How many snapshots the menu offers; the sidebar has them all. */
const OFFERED = 10;

/** Return the button that opens a menu of the notebook's latest snapshots, to restore one. */
export function restoreButton(model: Model, commands: CommandRegistry, trans: TranslationBundle): ToolbarButton {
  const button = new ToolbarButton({
    icon: caretDownIcon,
    tooltip: trans.__('Restore a snapshot of this kernel'),
    onClick: () => {
      const newest = model.snapshots
        .filter(snapshot => isOf(snapshot, model.notebook) && !snapshot.automatic)
        .slice(0, OFFERED);
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

/** How often the time is shown anew that a wake takes, in milliseconds. */
const TICK = 100;

/** Says in place of the kernel's own indicator what is done with it, that it sleeps, and how long it takes to wake. */
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
    return <UseSignal signal={this.model.changed}>{() => this._contents()}</UseSignal>;
  }

  private _contents(): React.JSX.Element {
    const kernelId = this.panel.sessionContext.session?.kernel?.id;
    const state = this.model.stateOf(kernelId);
    const since = this.model.wakingSince(kernelId);
    const text = this._text(state);
    const { cancelling, percent } = this.model.operationOf(kernelId) ?? {};
    return (
      <>
        <Moon state={state} />
        <span role="status">{cancelling ? this.trans.__('Cancelling…') : text}</span>
        {!cancelling && typeof percent === 'number' && <span aria-hidden="true">{percent} %</span>}
        {since !== undefined && <Elapsed since={since} />}
      </>
    );
  }

  private _text(state: State): string {
    // The style hides the kernel's own indicator meanwhile, which knows of neither.
    this.panel.toolbar.node.dataset.gpuckpt = state;
    const { trans } = this;
    return {
      running: '',
      saving: trans.__('Saving'),
      restoring: trans.__('Restoring'),
      forking: trans.__('Forking'),
      moving: trans.__('Moving'),
      'falling asleep': trans.__('Falling asleep'),
      sleeping: trans.__('Asleep'),
      waking: trans.__('Waking'),
      hibernating: trans.__('Hibernating'),
      hibernated: trans.__('Hibernated'),
      ended: ''
    }[state];
  }
}

/** The seconds since a moment, for those who see them: a screen reader would have to read each. */
function Elapsed({ since }: { since: number }): React.JSX.Element {
  const [now, setNow] = React.useState(Date.now);
  React.useEffect(() => {
    const timer = window.setInterval(() => setNow(Date.now()), TICK);
    return () => window.clearInterval(timer);
  }, []);
  return <span aria-hidden="true">… {seconds(Math.max(0, now - since) / 1000)}</span>;
}
