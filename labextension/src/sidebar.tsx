/** The sidebar; what it shows is loaded when it is first shown. */

import { ReactWidget } from '@jupyterlab/apputils';
import { UseSignal } from '@jupyterlab/ui-components';
import * as React from 'react';
import type { IProps } from './contents';
import { snapshotIcon } from './icons';

const Contents = React.lazy(() => import('./contents'));

export class Sidebar extends ReactWidget {
  private _wasShown = false;

  constructor(private readonly props: IProps) {
    super();
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
      </React.Suspense>
    ) : null;
  }

  protected override onAfterShow(): void {
    this._wasShown = true;
    this.update();
    this.props.model.visible = true;
  }

  protected override onAfterHide(): void {
    this.props.model.visible = false;
  }
}
