/** What the server's REST API tells, as `rest-api.yml` describes it. Sizes are bytes, times ISO 8601. */

/** An error: what happened, why, and what to do next. */
export interface IError {
  kind: string;
  what: string;
  why: string;
  then: string;
}

/** A saved kernel. */
export interface ISnapshot {
  name: string;
  id: string;
  message: string;
  created: string;
  size: number;
  gpu_memory: number;
  parent: string | null;
  notebook: string;
  kernel_id: string;
  execution_count: number | null;
}

/** A running kernel that can be saved. */
export interface IKernel {
  kernel_id: string;
  name: string;
  notebook: string;
  state: 'running' | 'saving' | 'restoring' | 'ended';
  memory: number;
  gpu_memory: number | null;
  parent: { name: string; id: string } | null;
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
}

export interface ISnapshots {
  snapshots: ISnapshot[];
  faults: IError[];
}

/** A save or restore under way, as events tell of it. */
export interface IProgress {
  id: string;
  kind: 'save' | 'restore';
  kernel_id: string;
  name: string;
  state: 'running' | 'done' | 'failed' | 'cancelled';
  stage: string;
  percent: number | null;
}

/** A save or restore with how it ended. */
export interface IOperation extends IProgress {
  result: (ISnapshot & { seconds: number }) | null;
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
