/** What the person sees, apart from how: kernels, snapshots and operations as the server tells of them. */

import type { Event } from '@jupyterlab/services';
import { Poll } from '@lumino/polling';
import { Signal, type ISignal } from '@lumino/signaling';
import { Api, asError } from './api';
import { size } from './format';
import { DEFAULTS, type IPreferences } from './preferences';
import type {
  IError,
  IKernel,
  IKernels,
  INotebook,
  IOperation,
  IPlainKernel,
  IProgress,
  ISnapshot,
  IStore,
  State
} from './types';

const OPERATION = 'https://schema.jupyter.org/jupyter_gpuckpt/operation/v1';
const SNAPSHOTS = 'https://schema.jupyter.org/jupyter_gpuckpt/snapshots/v1';

/** How often the server is asked while somebody looks: cells and terminals save, too. In milliseconds. */
const INTERVAL = 10_000;

/** What a kernel is doing during an operation. */
const DOING: Record<string, State> = {
  save: 'saving',
  restore: 'restoring',
  fork: 'forking',
  move: 'moving',
  sleep: 'falling asleep',
  wake: 'waking',
  hibernate: 'hibernating',
  undo: 'restoring',
  redo: 'restoring'
};
/** How soon the server is asked again while a kernel is in the middle of one, in milliseconds. */
const UNDER_WAY = 1000;

export class Model {
  private _kernels: IKernels = { kernels: [], plain: [], faults: [], unavailable: null, features: [] };
  private _snapshots: ISnapshot[] = [];
  private _coming = new Set<string | null>();
  private _faults: IError[] = [];
  private _store: IStore | null = null;
  private _problem: IError | null = null;
  private _loaded = false;
  private _visible = false;
  private _notebook: INotebook | null = null;
  private _preferences = DEFAULTS;
  private _told = '';
  /** The kernels that a cell is waking, and since when. */
  private readonly _waking = new Map<string, number>();
  private readonly _running = new Map<string, IProgress>();
  /** The operations that this page wants cancelled: the server hears of it a moment later. */
  private readonly _cancelling = new Set<string>();
  private readonly _changed = new Signal<this, void>(this);
  private readonly _moved = new Signal<this, IProgress>(this);
  private _wanted = false;
  private _updating: Promise<void> | null = null;

  constructor(
    readonly api: Api,
    events: Event.Stream
  ) {
    // It goes by itself from here on.
    void new Poll({
      factory: () => this._update(),
      frequency: { interval: INTERVAL, backoff: true, max: 10 * INTERVAL },
      standby: () => !this._visible || 'when-hidden',
      name: 'jupyter_gpuckpt'
    });
    events.connect((_, event) => this._hear(event));
  }

  /** Emitted when anything that is shown has changed. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  /** Emitted when an operation has begun, moved on or ended. */
  get moved(): ISignal<this, IProgress> {
    return this._moved;
  }

  /** What the person has chosen in the settings. */
  get preferences(): IPreferences {
    return this._preferences;
  }

  set preferences(preferences: IPreferences) {
    this._preferences = preferences;
    this._changed.emit();
  }

  /** All snapshots, newest first. */
  get snapshots(): readonly ISnapshot[] {
    return this._snapshots;
  }

  /** Tell whether something is being saved of a notebook, also of a kernel of its that has died. */
  isComing(notebook: INotebook): boolean {
    return this._coming.has(notebook.path);
  }

  /** Kernels and snapshots that cannot be told of. */
  get faults(): readonly IError[] {
    return [...this._kernels.faults, ...this._faults];
  }

  /** How much room the snapshots take and have; null where the server does not tell. */
  get store(): IStore | null {
    return this._store;
  }

  /** Why nothing is known; null where the server answers. */
  get problem(): IError | null {
    return this._problem;
  }

  /** Whether the server has answered at all. */
  get loaded(): boolean {
    return this._loaded;
  }

  /** Why no kernel can be saved on this machine; null where nothing speaks against it. */
  get unavailable(): IError | null {
    return this._kernels.unavailable;
  }

  /** Tell whether the server can do something that not every version of it can. */
  has(feature: string): boolean {
    return this._kernels.features.includes(feature);
  }

  /** The operations under way. */
  get running(): IProgress[] {
    return [...this._running.values()];
  }

  /** The notebook that the person is at. */
  get notebook(): INotebook | null {
    return this._notebook;
  }

  set notebook(notebook: INotebook | null) {
    if (JSON.stringify(notebook) !== JSON.stringify(this._notebook)) {
      this._notebook = notebook;
      this._changed.emit();
      this.refresh();
    }
  }

  /** Whether somebody looks at the list. */
  set visible(visible: boolean) {
    this._visible = visible;
    if (visible) {
      this.refresh();
    }
  }

  /** The notebook's kernel, if it can be saved. */
  get kernel(): IKernel | undefined {
    return this._kernels.kernels.find(kernel => kernel.kernel_id === this._notebook?.kernelId);
  }

  /** The notebook's kernel, if it cannot be saved. */
  get plain(): IPlainKernel | undefined {
    return this._kernels.plain.find(kernel => kernel.kernel_id === this._notebook?.kernelId);
  }

  /** The hibernated kernel that wakes from a snapshot, if that is held. */
  wakesFrom(snapshot: ISnapshot): IKernel | undefined {
    return this._kernels.kernels.find(({ hibernated }) => hibernated?.name === snapshot.name);
  }

  /** All kernels that can be saved. */
  get kernels(): readonly IKernel[] {
    return this._kernels.kernels;
  }

  /** What is under way on a kernel. */
  operationOf(kernelId: string | null | undefined): IProgress | undefined {
    return this.running.find(operation => operation.kernel_id === kernelId);
  }

  /** Tell what a kernel is doing, also where another than this server was asked for it. */
  stateOf(kernelId: string | null | undefined): State {
    if (this._waking.has(kernelId ?? '')) {
      return 'waking';
    }
    const kind = this.operationOf(kernelId)?.kind ?? '';
    const kernel = this._kernels.kernels.find(({ kernel_id }) => kernel_id === kernelId);
    return DOING[kind] ?? kernel?.state ?? 'running';
  }

  /** Tell whether a kernel can be asked for something; one that sleeps wakes for it. */
  isIdle(kernelId: string): boolean {
    return ['running', 'sleeping'].includes(this.stateOf(kernelId));
  }

  /** Since when a cell has been waking a kernel, on the clock of `Date.now`; undefined where none is. */
  wakingSince(kernelId: string | null | undefined): number | undefined {
    return this._waking.get(kernelId ?? '');
  }

  /** Take in what a kernel tells of itself: that it is `waking`, say, or `restored`. */
  told(kernelId: string, what: unknown): void {
    if (what === 'waking') {
      this._waking.set(kernelId, Date.now());
      this._changed.emit();
    } else {
      this._waking.delete(kernelId);
      this._changed.emit();
      this.refresh();
    }
  }

  /** Take in that a cell of a kernel has begun or ended: what it has done is in no snapshot yet. */
  ran(kernelId: string | undefined): void {
    const kernel = this._kernels.kernels.find(({ kernel_id }) => kernel_id === kernelId);
    if (kernel?.unsaved === null) {
      kernel.unsaved = { since: kernel.started, cells: 1, cell: null, computed: 0 };
      this._told = ''; // whatever the server says next is news
      this._changed.emit();
    }
  }

  /** Ask the server for everything; while it is being asked, once more afterwards. */
  refresh(): void {
    void this._update();
  }

  /** Ask the server for everything, and wait until it is known. */
  refreshed(): Promise<void> {
    return this._update();
  }

  /** Note that an operation is to be cancelled, before the server says so; or that it could not be asked for. */
  cancelling(id: string, wanted: boolean): void {
    if (wanted) {
      this._cancelling.add(id);
    } else {
      this._cancelling.delete(id);
    }
    const progress = this._running.get(id);
    if (progress !== undefined) {
      this._take({ ...progress, cancelling: wanted });
    }
  }

  /** Take in an operation that this page has begun, or found under way. */
  follow(operation: IOperation): void {
    // An event that came faster than the server's answer tells of a later stage.
    const known = operation.state === 'running' ? this._running.get(operation.id) : undefined;
    this._take(known ?? operation);
  }

  private _hear(event: Event.Emission): void {
    if (event.schema_id === OPERATION) {
      this._take(event as unknown as IProgress);
    } else if (event.schema_id === SNAPSHOTS) {
      this.refresh();
    }
  }

  private _take(told: IProgress): void {
    const progress = { ...told, cancelling: told.cancelling === true || this._cancelling.has(told.id) };
    if (progress.state === 'running') {
      this._running.set(progress.id, progress);
    } else {
      this._running.delete(progress.id);
      this._cancelling.delete(progress.id);
      this.refresh();
    }
    this._moved.emit(progress);
    this._changed.emit();
  }

  private _update(): Promise<void> {
    this._wanted = true;
    this._updating ??= this._fetchWhileWanted();
    return this._updating;
  }

  private async _fetchWhileWanted(): Promise<void> {
    while (this._wanted) {
      this._wanted = false;
      await this._fetch();
    }
    this._updating = null;
  }

  private async _fetch(): Promise<void> {
    try {
      const [kernels, found] = await Promise.all([this.api.kernels(), this.api.snapshots()]);
      if (kernels.kernels.some(({ state }) => Object.values(DOING).includes(state))) {
        // What this server was not asked for tells nothing when it ends.
        window.setTimeout(() => this.refresh(), UNDER_WAY);
      }
      const { snapshots, coming = [], faults, store = null } = found;
      this._coming = new Set(coming.map(one => one.path));
      // A disk is written to at all times: only what would be shown otherwise counts.
      const room = store && [store.folder, size(store.used), size(store.free), store.quota];
      const told = JSON.stringify([kernels, snapshots, faults, room]);
      if (told === this._told && this._problem === null) {
        return;
      }
      [this._kernels, this._snapshots, this._faults, this._store] = [kernels, snapshots, faults, store];
      [this._told, this._problem] = [told, null];
    } catch (reason) {
      this._problem = asError(reason);
    }
    this._loaded = true;
    this._changed.emit();
  }
}
