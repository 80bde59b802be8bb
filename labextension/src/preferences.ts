/** What a person has chosen in JupyterLab's settings. */

import type { ISettingRegistry } from '@jupyterlab/settingregistry';

export interface IPreferences {
  /** Whether cells are marked that were run after the snapshot was saved that their kernel was put back to. */
  markStaleCells: boolean;
  /** Whether a notebook that is opened asks for the kernel that was hibernated. */
  offerToResume: boolean;
  /** Whether the dialog that saves a kernel begins with its Python environment included. */
  includePackages: boolean;
}

export const DEFAULTS: IPreferences = { markStaleCells: true, offerToResume: true, includePackages: false };

/** Tell what is chosen now, and whenever that changes. */
export async function followPreferences(
  registry: ISettingRegistry,
  plugin: string,
  tell: (preferences: IPreferences) => void
): Promise<void> {
  const settings = await registry.load(plugin);
  const read = (): void => tell({ ...DEFAULTS, ...settings.composite });
  settings.changed.connect(read);
  read();
}
