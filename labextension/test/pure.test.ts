import type { TranslationBundle } from '@jupyterlab/translation';
import { arrange, drawn, inBackground, isHibernated, isOf, matches } from '../src/arrange';
import { both, counts } from '../src/difference';
import { ago, basename, seconds, size } from '../src/format';
import { forkPath, isName, nameOf, suggest } from '../src/names';
import { amountText, progressText, remaining, stepText } from '../src/progress';
import { heldBy, leftIn } from '../src/room';
import { extended, toggled } from '../src/selection';
import { isStale } from '../src/stale';
import { around, leadsTo } from '../src/steps';
import type { IDifference, IKernel, IProgress, ISnapshot } from '../src/types';

function snapshot(name: string, more: Partial<ISnapshot> = {}): ISnapshot {
  return {
    name,
    label: name,
    id: `id-${name}`,
    message: '',
    created: '2026-01-31T12:00:00.000000+00:00',
    size: 1000,
    gpu_memory: 0,
    parent: null,
    notebook: '/home/me/train.ipynb',
    path: null,
    kernel_id: 'k',
    job: '',
    execution_count: 3,
    pinned: false,
    tags: [],
    ...more
  };
}

const here = { path: 'train.ipynb', kernelId: null };

describe('the name that was given', () => {
  it.each(['base', 'base~0123abcd', 'a.ipynb:base', 'deep/a:b.ipynb:base'])('is in %s', called => {
    expect(nameOf(called)).toBe('base');
  });
});

describe('hibernated', () => {
  it('is told by the tag', () => {
    expect(isHibernated(snapshot('a', { tags: ['hibernated'] }))).toBe(true);
    expect(isHibernated(snapshot('hibernated'))).toBe(false);
    expect(isHibernated(snapshot('a', { tags: ['hibernated'], job: 'train' }))).toBe(false);
    expect(isHibernated(undefined)).toBe(false);
  });
});

describe('format', () => {
  it.each([
    [0, '0 B'],
    [999, '999 B'],
    [1000, '1.0 kB'],
    [85_400_000, '85.4 MB'],
    [999_000_000, '999 MB'],
    [24e9, '24.0 GB'],
    [5e15, '5000 TB']
  ])('writes %d bytes as %s', (bytes, text) => expect(size(bytes)).toBe(text));

  it.each([
    [0.04, '0.0 s'],
    [2.34, '2.3 s'],
    [61.5, '62 s']
  ])('writes %d seconds as %s', (span, text) => expect(seconds(span)).toBe(text));

  it.each([
    [5, 'just now'],
    [60, '1 minute ago'],
    [7200, '2 hours ago'],
    [86400, 'yesterday'],
    [40 * 86400, 'Jan 31, 2026'],
    [-100, 'just now']
  ])('writes %d seconds ago as %s', (seconds, text) => {
    const created = '2026-01-31T12:00:00+00:00';
    expect(ago(created, new Date(new Date(created).getTime() + seconds * 1000), 'en')).toBe(text);
  });

  it('takes the last part of a path', () => {
    expect(basename('/a/b.ipynb')).toBe('b.ipynb');
    expect(basename('b.ipynb')).toBe('b.ipynb');
  });
});

describe('names', () => {
  it.each(['a', 'epoch-3', '_x', 'a.b', 'x'.repeat(100)])('allows %s', name => expect(isName(name)).toBe(true));
  it.each(['', '.a', '-a', 'a b', 'a/b', 'é', 'x'.repeat(101)])('refuses %j', name => expect(isName(name)).toBe(false));

  it('suggests the notebook and a number that is free', () => {
    expect(suggest('deep/train.ipynb', new Set())).toBe('train-1');
    expect(suggest('train.ipynb', new Set(['train-1', 'train-2']))).toBe('train-3');
  });

  it.each(['Größe & Maß.ipynb', '.hidden.ipynb', '---.ipynb', '', 'x'.repeat(200), '日本語.ipynb'])(
    'suggests an allowed name for %j',
    path => expect(isName(suggest(path, new Set()))).toBe(true)
  );
});

describe('arrange', () => {
  it('puts the snapshots of the notebook first', () => {
    const { own, others } = arrange(
      [snapshot('b', { notebook: '/elsewhere/x.ipynb', kernel_id: 'o' }), snapshot('a')],
      here,
      ''
    );
    expect(own.map(row => row.snapshot.name)).toEqual(['a']);
    expect(others.map(row => row.snapshot.name)).toEqual(['b']);
  });

  it('has no automatic snapshots but those of the notebook', () => {
    const elsewhere = { notebook: '/elsewhere/x.ipynb', kernel_id: 'o', automatic: true };
    const { own, others } = arrange([snapshot('auto-2', elsewhere), snapshot('auto-1', { automatic: true })], here, '');
    expect(own.map(row => row.snapshot.name)).toEqual(['auto-1']);
    expect(others).toEqual([]);
  });

  it('leaves automatic ones out of the history, but what the kernel is based on and what is pinned', () => {
    const automatic = (name: string, parent: string, more = {}): ISnapshot =>
      snapshot(name, { parent: `id-${parent}`, automatic: true, ...more });
    const all = [
      automatic('auto-4', 'auto-3'),
      automatic('auto-3', 'mine'),
      snapshot('mine', { parent: 'id-auto-2' }),
      automatic('auto-2', 'auto-1', { pinned: true }),
      automatic('auto-1', 'base'),
      snapshot('base')
    ];
    const without = inBackground(all, here, 'id-auto-4');
    expect(without.map(({ name }) => name)).toEqual(['auto-3', 'auto-1']);
    expect(arrange(all, here, '', without).own.map(row => [row.snapshot.name, row.depth, row.origin])).toEqual([
      ['auto-4', 0, ''],
      ['mine', 0, ''],
      ['auto-2', 0, ''],
      ['base', 0, '']
    ]);
  });

  it('knows a notebook by its kernel and by the end of its path, not by a part of its name', () => {
    expect(isOf(snapshot('a', { notebook: '' }), { path: 'x.ipynb', kernelId: 'k' })).toBe(true);
    expect(isOf(snapshot('a', { notebook: '/home/me/my-train.ipynb' }), here)).toBe(false);
    expect(isOf(snapshot('a', { notebook: '/home/me/deep/train.ipynb', path: 'deep/train.ipynb' }), here)).toBe(false);
    expect(isOf(snapshot('a', { notebook: '/srv/train.ipynb', path: 'train.ipynb' }), here)).toBe(true);
    expect(isOf(snapshot('a'), null)).toBe(false);
  });

  const drawing = (...snapshots: ISnapshot[]): (string | number)[][] =>
    arrange(snapshots, here, '').own.map(row => [row.snapshot.name, row.depth, row.origin]);

  it('keeps the newest first, and indents at branches only', () => {
    const base = snapshot('base');
    const sweep = ['v1', 'v2', 'v3'].map(name => snapshot(name, { parent: 'id-base' })).reverse();
    expect(drawing(snapshot('v4', { parent: 'id-v3' }), ...sweep, base)).toEqual([
      ['v4', 0, ''],
      ['v3', 0, 'base'],
      ['v2', 1, 'base'],
      ['v1', 1, ''],
      ['base', 0, '']
    ]);
    // The line that goes straight on is that of the newest snapshot, not that of the newest child.
    expect(
      drawing(
        snapshot('d', { parent: 'id-b' }),
        snapshot('y', { parent: 'id-x' }),
        snapshot('x', { parent: 'id-a' }),
        snapshot('b', { parent: 'id-a' }),
        snapshot('a')
      )
    ).toEqual([
      ['d', 0, 'b'],
      ['y', 1, ''],
      ['x', 1, 'a'],
      ['b', 0, ''],
      ['a', 0, '']
    ]);
  });

  it('tells where a history begins and an unrelated one follows', () => {
    const rows = arrange(
      [snapshot('again', { parent: 'id-start' }), snapshot('start'), snapshot('lone', { parent: 'id-gone' })],
      here,
      ''
    ).own;
    expect(rows.map(row => [row.snapshot.name, row.first])).toEqual([
      ['again', false],
      ['start', true],
      ['lone', false]
    ]);
  });

  it('draws the newest, and wherever it lies the one that the kernel is based on', () => {
    const rows = arrange(
      ['d', 'c', 'b', 'a'].map(name => snapshot(name)),
      here,
      ''
    ).own;
    const names = (limit: number, id?: string): string[] => drawn(rows, limit, id).map(row => row.snapshot.name);
    expect(names(2, 'id-a')).toEqual(['d', 'c', 'a']);
    expect(names(2, 'id-c')).toEqual(['d', 'c']);
    expect(names(2)).toEqual(['d', 'c']);
    expect(names(9, 'id-a')).toEqual(['d', 'c', 'b', 'a']);
  });

  it('arranges a chain of thousands', () => {
    const chain = Array.from({ length: 5000 }, (_, i) => snapshot(`s${i}`, { parent: i ? `id-s${i - 1}` : null }));
    const rows = arrange(chain.reverse(), here, '').own;
    expect(rows.map(row => row.depth)).toEqual(Array(5000).fill(0));
    expect(rows[0]?.snapshot.name).toBe('s4999');
  });

  it('loses none whose parents go round in a circle', () => {
    const rows = arrange([snapshot('a', { parent: 'id-b' }), snapshot('b', { parent: 'id-a' })], here, '').own;
    expect(rows.map(row => row.snapshot.name).sort()).toEqual(['a', 'b']);
  });

  it('finds every word in name, message or notebook', () => {
    const one = snapshot('epoch-3', { message: 'Best loss yet' });
    expect(matches(one, 'LOSS epoch')).toBe(true);
    expect(matches(one, 'train')).toBe(true);
    expect(matches(one, 'epoch-4')).toBe(false);
    expect(arrange([one, snapshot('other')], here, ' best ').own).toHaveLength(1);
  });
});

describe('isStale', () => {
  const executed = { restored: 'start', cells: { first: 1, again: 5 }, others: [2] };
  it.each([
    ['first', 1, false],
    ['again', 5, false],
    ['again', 3, true],
    ['lost', 3, true],
    ['lost', 1, true],
    ['by another client', 2, false],
    ['never run', null, false]
  ])('for cell %j with number %s is %s', (id, count, stale) => expect(isStale(id, count, executed)).toBe(stale));

  it('is never so in a kernel that was not put back', () =>
    expect(isStale('lost', 3, { ...executed, restored: '' })).toBe(false));
});

describe('a step', () => {
  const snapshots = [snapshot('c', { parent: 'id-b' }), snapshot('b', { parent: 'id-gone' })];
  const kernel = (parent: string | null, more: Partial<IKernel> = {}): IKernel =>
    ({ parent: parent && { name: parent, id: `id-${parent}` }, unsaved: null, ...more }) as IKernel;
  const unsaved = { since: '', cells: 1, cell: null, computed: 0 };

  it('back leads to what the present state came from', () => {
    expect(leadsTo('undo', kernel('c'), snapshots)?.name).toBe('b');
    expect(leadsTo('undo', kernel('c', { unsaved }), snapshots)?.name).toBe('c');
    expect(leadsTo('undo', kernel('b'), snapshots)).toBeUndefined();
    expect(leadsTo('undo', kernel(null, { unsaved }), snapshots)).toBeUndefined();
  });

  it('is found by the cell, and not where others were executed with it', () => {
    const saved = (name: string, parent: string, cell: string, cells: number, hour: number): ISnapshot =>
      snapshot(name, { parent: `id-${parent}`, cell, cells, created: `2026-01-31T${hour}:00:00.000000+00:00` });
    const all = [
      saved('after-two', 'again', 'e', 5, 15),
      saved('again', 'auto-c', 'c', 3, 14),
      saved('auto-c', 'auto-b', 'c', 3, 13),
      saved('auto-b', 'auto-a', 'b', 2, 12),
      saved('auto-a', 'gone', 'a', 1, 11)
    ];
    const names = (cell: string): (string | undefined)[] =>
      (['before', 'after'] as const).map(place => around(place, cell, all)?.name);
    expect(names('b')).toEqual(['auto-a', 'auto-b']);
    expect(names('c')).toEqual(['auto-b', 'again']);
    expect(names('a')).toEqual([undefined, 'auto-a']);
    expect(names('e')).toEqual([undefined, 'after-two']);
    expect(names('d')).toEqual([undefined, undefined]);
    expect(around('after', undefined, all)).toBeUndefined();
  });

  it('forward leads to what was undone, while that is there', () => {
    expect(leadsTo('redo', kernel('b', { redo: 'id-c' }), snapshots)?.name).toBe('c');
    expect(leadsTo('redo', kernel('b', { redo: 'id-gone' }), snapshots)).toBeUndefined();
    expect(leadsTo('redo', kernel('b'), snapshots)).toBeUndefined();
  });
});

describe('forkPath', () => {
  it.each([
    ['train.ipynb', [], 'train-fork.ipynb'],
    ['deep/in/train.ipynb', ['train-fork.ipynb'], 'deep/in/train-fork-2.ipynb'],
    ['RTC:a b.ipynb', ['a b.ipynb'], 'RTC:a b-fork.ipynb']
  ])('puts a copy of %j beside it', (path, taken, copy) => expect(forkPath(path, new Set(taken))).toBe(copy));
});

describe('what differs', () => {
  const array = { type: 'numpy.ndarray', size: 8000, shape: [10, 100], dtype: 'float64' };

  it('counts variables by what became of them, and drops none whose type and shape are equal', () => {
    const variables = ['contents changed', 'reassigned', 'new', 'deleted'].map(how => ({
      name: how,
      how,
      old: how === 'new' ? null : array,
      new: how === 'deleted' ? null : array
    }));
    const found = { variables, unchanged: 5 } as unknown as IDifference;
    expect(counts(found)).toEqual({ changed: 2, new: 1, deleted: 1, same: 5 });
  });

  it('describes a variable in few words', () => {
    expect(both(null, array)).toEqual(['', 'ndarray (10, 100) float64, 8.0 kB']);
    expect(both({ type: 'float', size: 24 }, { type: 'list', size: 88, length: 0 })).toEqual([
      'float',
      'list of length 0'
    ]);
  });

  it('says how much is within an object', () =>
    expect(both(null, { type: 'net.MLP', arrays: 214, holds: 44e6 })[1]).toBe('MLP with 214 arrays, 44.0 MB'));

  it('says of which modules two types are that have one name', () =>
    expect(both({ type: 'one.Model' }, { type: 'other.Model' })).toEqual(['one.Model', 'other.Model']));
});

describe('progress', () => {
  const trans = {
    __: (text: string, ...args: unknown[]) => text.replace(/%(\d)/g, (_, n) => String(args[Number(n) - 1]))
  } as unknown as TranslationBundle;
  const saving: IProgress = {
    id: 'o',
    kind: 'save',
    kernel_id: 'k',
    name: 'base',
    state: 'running',
    stage: 'writing',
    percent: null,
    total: null,
    left: null,
    cancelling: false
  };
  const half = { ...saving, percent: 48, total: 2e9, left: 41 };

  it.each([
    [0, 'a moment left'],
    [7.4, 'about 7 s left'],
    [47, 'about 45 s left'],
    [88, 'about 1 min left'],
    [200, 'about 3 min left'],
    [3 * 3600, 'about 3 h left']
  ])('of %d seconds says roughly what is left', (span, text) => expect(remaining(span, trans)).toBe(text));

  it('says the step, how much of it is done, and how long that will still take', () => {
    expect(progressText(saving, trans)).toBe('Saving base: writing');
    expect(progressText(half, trans)).toBe('Saving base: writing 48 % of 2.0 GB · about 40 s left');
    expect(progressText({ ...half, left: null }, trans)).toBe('Saving base: writing 48 % of 2.0 GB');
    expect(progressText({ ...half, kind: 'push', stage: 'send' }, trans)).toBe(
      'Pushing base: 48 % of 2.0 GB · about 40 s left'
    );
  });

  it('does not go on counting what is being cancelled', () => {
    const ending = { ...half, cancelling: true };
    expect([stepText(ending, trans), amountText(ending, trans)]).toEqual(['Saving base: cancelling…', '']);
    expect(progressText({ ...ending, kind: 'pull' }, trans)).toBe('Pulling base: cancelling…');
  });

  it('of a server of an older version is as it tells it', () => {
    const { total, left, cancelling, ...told } = half;
    expect([total, left, cancelling]).toHaveLength(3);
    expect(progressText(told, trans)).toBe('Saving base: writing 48 %');
  });
});

describe('what is chosen', () => {
  const order = ['a', 'b', 'c', 'd'];
  it('is one more or one less', () => {
    expect([...toggled(new Set(['a']), 'b')]).toEqual(['a', 'b']);
    expect([...toggled(new Set(['a', 'b']), 'a')]).toEqual(['b']);
  });

  it.each([
    ['a', 'c', ['a', 'b', 'c']],
    ['d', 'b', ['b', 'c', 'd']],
    [null, 'b', ['b']],
    ['of another list', 'b', ['b']]
  ])('reaches from %j to %j', (from, to, all) => expect([...extended(new Set(), order, from, to)].sort()).toEqual(all));
});

describe('the room for snapshots', () => {
  it('is what the disk has, or what the quota leaves', () => {
    const store = { folder: '/store', used: 30, free: 100 };
    expect(leftIn({ ...store, quota: null })).toBe(100);
    expect(leftIn({ ...store, quota: 50 })).toBe(20);
    expect(leftIn({ ...store, quota: 20 })).toBe(0);
    expect(leftIn({ ...store, quota: 500 })).toBe(100);
  });

  it('is needed for what a kernel holds, whether or not the driver tells', () => {
    expect(heldBy({ memory: 5, gpu_memory: 7 } as IKernel)).toBe(12);
    expect(heldBy({ memory: 5, gpu_memory: null } as IKernel)).toBe(5);
  });
});
