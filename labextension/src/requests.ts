/**
 * What the REST API takes for each operation on a kernel.
 *
 * Made from `jupyter_gpuckpt/operations/requests.py` by `python labextension/request_types.py`.
 */
export interface IRequests {
  save: {
    name: string;
    message?: string;
    replace?: boolean;
    with_files?: boolean;
    store?: string;
  };
  restore: {
    name?: string;
    from?: string;
    gpu?: number;
    lazy?: boolean;
    in_place?: boolean;
    stop_here?: boolean;
    discard?: boolean;
    store?: string;
  };
  undo: {
    steps?: number;
  };
  redo: {
    steps?: number;
  };
  fork: {
    snapshot?: string;
    count?: number;
    name?: string;
    reseed?: boolean;
    gpu?: number;
  };
  move: {
    gpu: number;
  };
  sleep: Record<string, never>;
  hibernate: Record<string, never>;
  wake: Record<string, never>;
}
