/** The status bar's item: how far the operations are, and a way to cancel them. */

import { ReactWidget } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import { UseSignal } from '@jupyterlab/ui-components';
import * as React from 'react';
import type { Follower } from './follow';
import type { Model } from './model';
import { progressText, stepText } from './progress';

export class StatusItem extends ReactWidget {
  constructor(
    private readonly model: Model,
    private readonly follower: Follower,
    private readonly trans: TranslationBundle
  ) {
    super();
    this.addClass('jp-gpuckpt-Status');
  }

  protected override render(): React.JSX.Element {
    const { model, follower, trans } = this;
    return (
      <UseSignal signal={model.changed}>
        {() =>
          model.running.map(operation => (
            <span key={operation.id}>
              {progressText(operation, trans)}
              <button
                aria-label={trans.__('Cancel: %1', stepText(operation, trans))}
                disabled={operation.cancelling}
                onClick={() => void follower.cancel(operation.id)}
              >
                {trans.__('Cancel')}
              </button>
            </span>
          ))
        }
      </UseSignal>
    );
  }
}
