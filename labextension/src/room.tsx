/** The sidebar's foot: what is chosen, and what room the snapshots take and have. */

import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';
import { size } from './format';
import type { IKernel, IStore } from './types';

/** Say what the store takes and has left, in one line. */
export function roomText({ used, quota }: IStore, left: number, trans: TranslationBundle): string {
  return quota === null
    ? trans.__('Snapshots: %1 · %2 free', size(used), size(left))
    : trans.__('Snapshots: %1 of %2 · %3 free', size(used), size(quota), size(left));
}

/** How many bytes can be added to a store: what its disk has, and what its quota leaves. */
export function leftIn({ free, used, quota }: IStore): number {
  return quota === null ? free : Math.max(0, Math.min(free, quota - used));
}

/** What a kernel holds, in bytes: a save of it takes no more than that. */
export function heldBy(kernel: IKernel): number {
  return kernel.memory + (kernel.gpu_memory ?? 0);
}

interface IProps {
  store: IStore;
  kernel: IKernel | undefined;
  trans: TranslationBundle;
}

/** What room there is, with a warning where a save of the notebook's kernel may find too little. */
export function Room({ store, kernel, trans }: IProps): React.JSX.Element {
  const left = leftIn(store);
  const held = kernel === undefined ? 0 : heldBy(kernel);
  return (
    <>
      {/* Always there: a screen reader tells of what changes in it. */}
      <p className="jp-gpuckpt-NoRoom" role="status">
        {held > left &&
          trans.__(
            'A save may not fit: this kernel holds %1, and %2 are free. Remove snapshots that you no longer need.',
            size(held),
            size(left)
          )}
      </p>
      <p className="jp-gpuckpt-Room" title={trans.__('The snapshots are kept in %1.', store.folder)}>
        {roomText(store, left, trans)}
      </p>
    </>
  );
}
