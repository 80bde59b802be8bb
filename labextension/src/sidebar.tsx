/** The sidebar; what it shows is loaded when it is first shown. */

import { ReactWidget } from '@jupyterlab/apputils';
import { UseSignal } from '@jupyterlab/ui-components';
import * as React from 'react';
import type { IProps } from './contents';
import { snapshotIcon } from './icons';

const Contents = React.lazy(() => import('./contents'));

export class Sidebar extends ReactWidget {
  private _wasShown = false;

  /** `leave` brings the person back to where they work. */
  constructor(
    private readonly props: IProps,
    readonly leave: () => void
  ) {
    super();
    this.node.tabIndex = -1; // it has the focus until there is something in it
    this.node.addEventListener('keydown', event => {
      // A search is ended by it, and what is in the sidebar may have its own use for it, but hears of it after this.
      if (event.key === 'Escape' && !(event.target as HTMLInputElement).value) {
        window.setTimeout(() => event.defaultPrevented || this.leave());
      }
    });
    this.id = 'jp-gpuckpt-sidebar';
    this.addClass('jp-gpuckpt-Sidebar');
    this.title.icon = snapshotIcon;
    this.title.caption = props.trans.__('Kernel Snapshots');
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', props.trans.__('Kernel snapshots'));
  }

  protected override render(): React.JSX.Element | null {
    return this._wasShown ? (
      <React.Suspense>
        <UseSignal signal={this.props.model.changed}>{() => <Contents {...this.props} />}</UseSignal>
        <Loaded done={this._onLoaded} />
      </React.Suspense>
    ) : null;
  }

  protected override onAfterShow(): void {
    this._wasShown = true;
    this.update();
    this.props.model.visible = true;
  }

  private readonly _onLoaded = (): void => {
    if (document.activeElement === this.node) {
      this.onActivateRequest();
    }
  };

  /** Move the focus here: to the snapshots, or to what can be done first. */
  protected override onActivateRequest(): void {
    const find = (place: string): HTMLElement | null => this.node.querySelector(place);
    (
      find('[role="treeitem"][tabindex="0"]') ??
      find('button:enabled:not([aria-disabled="true"])') ??
      this.node
    ).focus();
  }

  protected override onAfterHide(): void {
    this.props.model.visible = false;
  }
}

/** Tells when what stands beside it is there. */
function Loaded({ done }: { done: () => void }): null {
  React.useEffect(done, [done]);
  return null;
}
