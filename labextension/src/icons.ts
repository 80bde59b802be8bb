/** The project's own icons. */

import { LabIcon } from '@jupyterlab/ui-components';

/** A kernel in the frame of a camera. */
export const snapshotIcon = new LabIcon({
  name: 'jupyter_gpuckpt:snapshot',
  svgstr:
    '<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24">' +
    '<path class="jp-icon3 jp-icon-selectable" fill="#616161" d="M3 3h6v2H5v4H3zm12 0h6v6h-2V5h-4zM3 15h2v4h4v2H3zm16 0h2v6h-6v-2h4z' +
    'M12 7a5 5 0 1 0 0 10 5 5 0 0 0 0-10zm0 2a3 3 0 1 1 0 6 3 3 0 0 1 0-6z"/></svg>'
});

/** A moon: the kernel sleeps. */
export const moonIcon = new LabIcon({
  name: 'jupyter_gpuckpt:moon',
  svgstr:
    '<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24">' +
    '<path class="jp-icon3 jp-icon-selectable" fill="#616161" d="M12.3 3a9 9 0 1 0 8.6 11.6A7.2 7.2 0 0 1 12.3 3z"/></svg>'
});
