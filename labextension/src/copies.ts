/** Opening notebooks, and copies of them that are run by a kernel of their own. Loaded when first wanted. */

import type { INotebookTracker } from '@jupyterlab/notebook';
import type { ServiceManager } from '@jupyterlab/services';
import type { CommandRegistry } from '@lumino/commands';
import type { INotebooks } from './actions';
import { forkPath } from './names';

export function copiesOf(
  tracker: INotebookTracker,
  services: ServiceManager.IManager,
  commands: CommandRegistry
): INotebooks {
  return {
    async copyOnto(path, kernelId) {
      const panel = tracker.find(candidate => candidate.context.localPath === path);
      if (panel === undefined) {
        throw new Error(`${path} is no longer open.`);
      }
      const { contents, sessions } = services;
      const original = panel.context.path;
      const folder = await contents.get(original.slice(0, Math.max(0, original.lastIndexOf('/'))));
      const taken = new Set((folder.content as { name: string }[]).map(file => file.name));
      const copy = forkPath(original, taken);
      const content = panel.context.model.toJSON();
      await contents.save(copy, { type: 'notebook', format: 'json', content });
      const name = copy.slice(copy.lastIndexOf('/') + 1);
      // Whoever opens the copy finds its session, and with it the kernel: in JupyterLab here, in Notebook in a new tab.
      const session = await sessions.startNew({
        path: contents.localPath(copy),
        name,
        type: 'notebook',
        // The server takes a kernel that runs already; the type tells of new ones only.
        kernel: { id: kernelId } as { name?: string }
      });
      session.dispose();
      await commands.execute('docmanager:open', { path: copy });
      return copy;
    },
    open: path => commands.execute('docmanager:open', { path }),
    async changeKernel(path, kernelId) {
      const panel = tracker.find(candidate => candidate.context.localPath === path);
      await panel?.sessionContext.changeKernel({ id: kernelId });
    },
    shutDown: kernelId => services.kernels.shutdown(kernelId)
  };
}
