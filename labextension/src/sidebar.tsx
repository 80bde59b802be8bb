/** The sidebar; what it shows is loaded when it is first shown. */

import { ReactWidget } from '@jupyterlab/apputils';
import { UseSignal } from '@jupyterlab/ui-components';
import type { Message } from '@lumino/messaging';
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
    const places = ['[role="treeitem"][tabindex="0"]', 'button:enabled'];
    const first = places.map(place => this.node.querySelector<HTMLElement>(place)).find(found => found !== null);
    (first ?? this.node).focus();
  }

  protected override onAfterAttach(message: Message): void {
    super.onAfterAttach(message);
    this.node.addEventListener('keydown', this._onKeyDown);
  }

  protected override onBeforeDetach(message: Message): void {
    this.node.removeEventListener('keydown', this._onKeyDown);
    super.onBeforeDetach(message);
  }

  private readonly _onKeyDown = (event: KeyboardEvent): void => {
    if (event.key === 'Escape') {
      // Later: what is in the sidebar may have its own use for it, and hears of it after this.
      window.setTimeout(() => event.defaultPrevented || this.leave());
    }
  };

  protected override onAfterHide(): void {
    this.props.model.visible = false;
  }
}

/** Tells when what stands beside it is there. */
function Loaded({ done }: { done: () => void }): null {
  React.useEffect(done, [done]);
  return null;
}
