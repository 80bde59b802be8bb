/** What the server's REST API tells, as `rest-api.yml` describes it. Sizes are bytes, times ISO 8601. */

/** An error: what happened, why, and what to do next. */
export interface IError {
  kind: string;
  what: string;
  why: string;
  then: string;
  /** What describes the case further, by kind. */
  data?: Record<string, unknown>;
}

/** A saved kernel. */
export interface ISnapshot {
  /** What it is called in requests: no other one is called so. */
  name: string;
  /** What people call it: its name, and where several notebooks have that one, `notebook:name`. */
  label: string;
  id: string;
  message: string;
  created: string;
  size: number;
  gpu_memory: number;
  parent: string | null;
  notebook: string;
  /** The notebook's path below the server's root; null where it does not lie there. */
  path: string | null;
  kernel_id: string;
  /** The job that it was saved from; empty for a kernel's. */
  job: string;
  execution_count: number | null;
  /** Whether it must be neither removed nor replaced. */
  pinned: boolean;
  tags: string[];
  /** Whether it was saved by itself after a cell; missing where the server is of an older version. */
  automatic?: boolean;
  /** The id of the cell that the kernel had executed last; empty in the middle of one. Missing, as `cells`, if unknown. */
  cell?: string;
  /** How many cells the kernel had executed. */
  cells?: number;
}

/** What a kernel is doing. */
export type State =
  | 'running'
  | 'saving'
  | 'restoring'
  | 'forking'
  | 'moving'
  | 'falling asleep'
  | 'sleeping'
  | 'waking'
  | 'hibernating'
  | 'hibernated'
  | 'ended';

/** What a kernel has done that is in no snapshot. */
export interface IUnsaved {
  /** When it was last saved, restored or started. */
  since: string;
  /** How many cells have begun since; null where that is not known. */
  cells: number | null;
  /** The one that runs; null where none does. */
  cell: { number: number; begins: string } | null;
  /** How much processor time it has used since, in seconds. */
  computed: number;
}

/** Whether a kernel is saved after its cells, and by what rule. */
export interface IAutoSaving {
  /** After those that ran for so many seconds; null for none. */
  after: number | null;
  /** Not after cells, but every so many seconds; missing for after cells. */
  every?: number;
  /** How many such snapshots are kept. */
  keep: number;
  /** While the store takes more, the oldest of them are removed; null for any size. */
  under: number | null;
  /** Why the last one failed; empty where it did not. */
  failed: string;
}

/** A running kernel that can be saved. */
export interface IKernel {
  kernel_id: string;
  name: string;
  notebook: string;
  state: State;
  /** Whether a server or another program holds it. */
  attended: boolean;
  /** Where it outlived the server that held it: the notebook's path; null where somebody holds it. */
  reconnect: string | null;
  memory: number;
  /** What it holds on GPUs; null where the driver does not tell. */
  gpu_memory: number | null;
  /** What it has given back on GPUs while it sleeps, and how much host memory that takes. */
  gpu: { freed: number; host_memory: number };
  /** Since when it sleeps; null while it is awake. */
  asleep_since: string | null;
  /** Where it is on the disk alone: since when, as which snapshot, and its size there; null else. */
  hibernated: { since: string; name: string; size: number } | null;
  /** Whether nobody but the person may put it to sleep. */
  pinned: boolean;
  /** After how many idle seconds it goes to sleep by itself; null for never. */
  sleep_after: number | null;
  /** When it was last woken and how long that took, in seconds; null where it never was. */
  woken: { at: string; seconds: number } | null;
  /** When it was started, or put back to a snapshot. */
  started: string;
  parent: { name: string; id: string } | null;
  /** The id of the kernel that it was forked from; empty where it was started. */
  copy_of: string;
  /** Null where it has done nothing; missing where its keeper is of an older version. */
  unsaved?: IUnsaved | null;
  /** Missing where its keeper is of an older version. */
  auto?: IAutoSaving;
  /** The id of the snapshot that a redo goes to; missing where there is none. */
  redo?: string;
}

/** A running kernel that cannot be saved, and why. */
export interface IPlainKernel {
  kernel_id: string;
  name: string;
  why: IError;
}

export interface IKernels {
  kernels: IKernel[];
  plain: IPlainKernel[];
  faults: IError[];
  unavailable: IError | null;
  /** What the server can do of that which some versions of it cannot: fork, push, pull, export, sleep, hibernate, undo. */
  features: string[];
}

/** Which cells a kernel has executed: any other is no part of its state. */
export interface IExecuted {
  /** The snapshot that it was last put back to; empty where it never was. */
  restored: string;
  /** By the cell's id, the number that it was last executed under. */
  cells: Record<string, number>;
  /** The numbers of cells whose id the client did not tell. */
  others: number[];
}

/** The snapshot of a hibernated kernel. */
export interface IHibernated extends ISnapshot {
  /** Whether its kernel is still held, and wakes from it. */
  held: boolean;
}

/** What is known of a variable of a kernel. */
export interface IVariable {
  type: string;
  size?: number;
  length?: number;
  shape?: number[];
  dtype?: string;
  device?: string;
  /** How many arrays are within it, and their bytes. */
  arrays?: number;
  holds?: number;
}

/** How much of some part of two snapshots is in the second alone, and its sizes in both; null where it is not there. */
export interface IChange {
  changed: number;
  old: number | null;
  new: number | null;
}

/** What differs between two snapshots. */
export interface IDifference {
  /** The most important first. */
  variables: { name: string; how: string; old: IVariable | null; new: IVariable | null }[];
  /** How many variables were compared and are the same; null where nothing is known of variables. */
  unchanged: number | null;
  /** The names of those that seem to be the same, but may hold something else. */
  not_compared: string[];
  /** Whether both come from one process. */
  same_origin: boolean;
  memory: IChange[];
  gpu_memory: IChange[];
  used_files: { path: string; how: string }[];
  kept_files: { path: string; how: string }[];
  /** The sum of all, in bytes. */
  changed: number;
  /** The parts of the snapshots. */
  files: (IChange & { path: string })[];
}

export interface ILog {
  name: string;
  text: string;
}

/** How much room all snapshots take and have. */
export interface IStore {
  folder: string;
  /** What they take. */
  used: number;
  /** What is free on their disk. */
  free: number;
  /** What they may take at most; null where nothing limits it. */
  quota: number | null;
}

export interface ISnapshots {
  snapshots: ISnapshot[];
  /** What is being saved, by the path of its notebook. Missing where the server is of an older version. */
  coming?: { name: string; path: string | null }[];
  faults: IError[];
  /** Missing where the server is of an older version. */
  store?: IStore;
}

/** What a file with a snapshot is, by how it begins. */
export interface ILook {
  /** Null where more bytes are needed to say. */
  snapshot: ISnapshot | null;
  /** How many of its first bytes are needed. */
  needs: number;
  /** Whether this very snapshot is in the store. */
  here: boolean;
  /** Whether another one has its name. */
  taken: boolean;
}

/** What became of several snapshots that were to be removed, or would become of them. */
export interface IRemoval {
  removed?: string[];
  would_remove?: string[];
  /** Bytes. */
  freed: number;
  /** One for each that stays. */
  errors: IError[];
}

/** A save, a restore or other long work under way, as events tell of it. */
export interface IProgress {
  id: string;
  kind: string;
  kernel_id: string;
  name: string;
  state: 'running' | 'done' | 'failed' | 'cancelled';
  stage: string;
  percent: number | null;
  /** How many bytes the stage is about, and how many seconds it will still take; missing where the server is older. */
  total?: number | null;
  left?: number | null;
  /** Whether somebody asked for it to be cancelled. */
  cancelling?: boolean;
}

/** The same with how it ended. */
export interface IOperation extends IProgress {
  result: Record<string, unknown> | null;
  error: IError | null;
}

/** One thing that the doctor looked at. */
export interface ICheck {
  name: string;
  ok: boolean;
  required: boolean;
  found: string;
  means: string;
  mend: string;
}

/** The notebook that the person is at. */
export interface INotebook {
  /** Its path below the server's root. */
  path: string;
  /** Null where it has no kernel. */
  kernelId: string | null;
}
