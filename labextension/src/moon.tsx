/** The sign of a kernel that sleeps. */

import * as React from 'react';
import { moonIcon } from './icons';
import type { State } from './types';

/** A moon beside the name of a kernel that sleeps; what it says stands in the text. */
export function Moon({ state }: { state: State }): React.JSX.Element | null {
  return state === 'sleeping' || state === 'hibernated' ? (
    <moonIcon.react tag="span" className="jp-gpuckpt-Moon" aria-hidden="true" elementSize="normal" />
  ) : null;
}
