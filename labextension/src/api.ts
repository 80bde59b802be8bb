/** The server's REST API, `api/gpuckpt`. */

import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';
import type { IRequests } from './requests';
import type {
  ICheck,
  IDifference,
  IError,
  IExecuted,
  IHibernated,
  IKernels,
  ILog,
  ILook,
  IOperation,
  IRemoval,
  ISnapshot,
  ISnapshots
} from './types';

/** An error of the API, with what happened, why, and what to do next. */
export class ApiError extends Error {
  constructor(readonly error: IError) {
    super(error.what);
  }
}

/** Return any error as what happened, why, and what to do next. */
export function asError(reason: unknown): IError {
  if (reason instanceof ApiError) {
    return reason.error;
  }
  return {
    kind: 'Unreachable',
    what: 'The Jupyter server does not answer.',
    why: reason instanceof Error ? reason.message : String(reason),
    then: 'Check that the server still runs, and reload the page.'
  };
}

/** What a file with a snapshot is brought in by, besides its maker's key. */
export interface IAdmission {
  /** Opens it where it is encrypted. */
  passphrase: string;
  /** Whether it may be older than one of its name that was here before. */
  older: boolean;
}

/** Asks the server; every method throws an `ApiError` where the server refuses. Names of snapshots need no escaping. */
export class Api {
  constructor(private readonly settings: ServerConnection.ISettings) {}

  kernels(): Promise<IKernels> {
    return this.ask('GET', 'kernels');
  }

  executed(kernelId: string): Promise<IExecuted> {
    return this.ask('GET', `kernels/${kernelId}/executed`);
  }

  snapshots(): Promise<ISnapshots> {
    return this.ask('GET', 'snapshots');
  }

  async operations(): Promise<IOperation[]> {
    return (await this.ask<{ operations: IOperation[] }>('GET', 'operations')).operations;
  }

  operation(id: string): Promise<IOperation> {
    return this.ask('GET', `operations/${id}`);
  }

  async log(operation: string): Promise<ILog[]> {
    return (await this.ask<{ logs: ILog[] }>('GET', `operations/${operation}/log`)).logs;
  }

  cancel(id: string): Promise<IOperation> {
    return this.ask('DELETE', `operations/${id}`);
  }

  /** Begin an operation on a kernel. */
  operate<K extends keyof IRequests>(kind: K, kernelId: string, request: IRequests[K]): Promise<IOperation> {
    return this.ask('POST', `kernels/${kernelId}/${kind}`, request);
  }

  async hibernated(): Promise<IHibernated[]> {
    return (await this.ask<{ hibernated: IHibernated[] }>('GET', 'hibernated')).hibernated;
  }

  /** Bring a hibernated kernel back in the place of another. */
  resume(name: string, kernelId: string): Promise<IOperation> {
    return this.ask('POST', `hibernated/${name}/resume`, { kernel_id: kernelId });
  }

  /** Change when a kernel goes to sleep by itself; 0 seconds are for never. */
  change(kernelId: string, changes: { pinned?: boolean; sleep_after?: number }): Promise<unknown> {
    return this.ask('PATCH', `kernels/${kernelId}`, changes);
  }

  /** Have a kernel saved after each cell, or no longer. */
  auto(kernelId: string, on: boolean): Promise<unknown> {
    return this.ask('POST', `kernels/${kernelId}/auto`, { on });
  }

  remove(name: string): Promise<{ freed: number }> {
    return this.ask('DELETE', `snapshots/${name}`);
  }

  /** Remove several snapshots, or only ask what that would free. */
  removeAll(names: readonly string[], dryRun: boolean): Promise<IRemoval> {
    return this.ask('POST', 'removal', { names, dry_run: dryRun });
  }

  /** Give a snapshot another note or other tags. */
  describe(name: string, changes: { message?: string; tags?: string[] }): Promise<unknown> {
    return this.ask('PATCH', `snapshots/${name}`, changes);
  }

  rename(name: string, wanted: string): Promise<{ name: string }> {
    return this.ask('POST', `snapshots/${name}/rename`, { name: wanted });
  }

  pin(name: string, pinned: boolean): Promise<unknown> {
    return this.ask('POST', `snapshots/${name}/pin`, { pinned });
  }

  difference(name: string, other: string): Promise<IDifference> {
    return this.ask('GET', `snapshots/${name}/diff/${other}`);
  }

  push(name: string, url: string, replace: boolean): Promise<IOperation> {
    return this.ask('POST', `snapshots/${name}/push`, { url, replace });
  }

  pull(url: string, name: string, replace: boolean): Promise<IOperation> {
    return this.ask('POST', 'pull', { url, name, replace });
  }

  /** Return the address of a snapshot as one file, once the server has begun to answer with that. */
  async export(name: string): Promise<string> {
    const response = await this.request('GET', `snapshots/${name}/export`);
    await response.body?.cancel();
    return response.url;
  }

  /** Judge a file of so many bytes with a snapshot by how it begins. */
  lookAt(head: Blob, bytes: number, how: IAdmission): Promise<ILook> {
    return this.ask('POST', `import/look?size=${bytes}&older=${how.older}`, head, passphraseOf(how));
  }

  /** Send a file with a snapshot, which is in the store then; `sent` is told how many bytes have gone. */
  import(
    file: File,
    how: IAdmission & { replace: boolean },
    sent: (bytes: number) => void,
    signal: AbortSignal
  ): Promise<ISnapshot> {
    return new Promise((resolve, reject) => {
      const request = new XMLHttpRequest(); // `fetch` does not tell how much has gone
      const { baseUrl, token } = this.settings;
      request.open('POST', `${URLExt.join(baseUrl, 'api/gpuckpt/import')}?replace=${how.replace}&older=${how.older}`);
      const [, xsrf] = /(?:^|; )_xsrf=([^;]*)/.exec(document.cookie) ?? [];
      const headers = {
        ...(token && { Authorization: `token ${token}` }),
        ...(xsrf && { 'X-XSRFToken': xsrf }),
        ...passphraseOf(how)
      };
      Object.entries(headers).forEach(([name, value]) => request.setRequestHeader(name, value));
      request.upload.onprogress = ({ loaded }) => sent(loaded);
      request.onerror = () => reject(new Error('The connection was closed.'));
      request.onabort = () => reject(new DOMException('', 'AbortError'));
      request.onload = () => {
        const answer = parsed(request.responseText);
        if (request.status === 200) {
          resolve(answer as ISnapshot);
        } else {
          const { error, message } = answer as IRefusal;
          reject(new ApiError(error ?? refusal(request.status, message)));
        }
      };
      signal.addEventListener('abort', () => request.abort());
      request.send(file);
    });
  }

  /** Trust whatever the holder of a key signs. */
  trust(key: string, comment: string): Promise<unknown> {
    return this.ask('POST', 'trust', { key, comment });
  }

  adopt(kernelId: string): Promise<unknown> {
    return this.ask('POST', `kernels/${kernelId}/adopt`);
  }

  doctor(): Promise<{ works: boolean; checks: ICheck[] }> {
    return this.ask('GET', 'doctor');
  }

  private async ask<T>(method: string, path: string, body?: object, headers?: Record<string, string>): Promise<T> {
    return (await (await this.request(method, path, body, headers)).json()) as T;
  }

  private async request(
    method: string,
    path: string,
    body?: object,
    headers: Record<string, string> = {}
  ): Promise<Response> {
    const url = URLExt.join(this.settings.baseUrl, 'api/gpuckpt', path);
    const init = { method, headers, ...(body ? { body: body instanceof Blob ? body : JSON.stringify(body) } : {}) };
    const response = await ServerConnection.makeRequest(url, init, this.settings);
    if (!response.ok) {
      const answer = parsed(await response.text()) as IRefusal;
      throw new ApiError(answer.error ?? refusal(response.status, answer.message));
    }
    return response;
  }
}

/** The header that a passphrase goes in: addresses are logged. */
function passphraseOf({ passphrase }: IAdmission): Record<string, string> {
  return passphrase ? { 'Gpuckpt-Passphrase': encodeURIComponent(passphrase) } : {};
}

/** What a server says that refuses: one of ours with an error, one in front of it with anything. */
interface IRefusal {
  message?: string;
  error?: IError;
}

function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return {};
  }
}

function refusal(status: number, message: string | undefined): IError {
  const absent = status === 404;
  return {
    kind: 'HttpError',
    what: absent ? "The server's part of gpuckpt is not there." : 'The Jupyter server refused the request.',
    why: message ?? `It answered with status ${status}.`,
    then: absent
      ? 'Install jupyter_gpuckpt in the environment of the Jupyter server, and restart it.'
      : 'Log in again, or ask whoever runs the server for the right to do this.'
  };
}
