/* The panel of snapshots in a cell. All that it knows is the model's `state`; all that it does is a message. */

/** How long the kernel may be silent before that is said, in milliseconds. */
const PATIENCE = 8000;
const UNITS = ['B', 'kB', 'MB', 'GB', 'TB'];

function size(bytes) {
  let value = bytes;
  let unit = 0;
  while (value >= 1000 && unit < UNITS.length - 1) {
    value /= 1000;
    unit++;
  }
  return `${value.toFixed(unit === 0 || value >= 100 ? 0 : 1)} ${UNITS[unit]}`;
}

/** The name that a snapshot was given, without the notebook that its label may tell. */
function nameOf({ label }) {
  return label.slice(label.lastIndexOf(':') + 1);
}

function ago(since) {
  const seconds = (Date.now() - new Date(since).getTime()) / 1000;
  const relative = new Intl.RelativeTimeFormat('en');
  for (const [unit, length] of [
    ['day', 86400],
    ['hour', 3600],
    ['minute', 60]
  ]) {
    if (seconds >= length) {
      return relative.format(-Math.floor(seconds / length), unit);
    }
  }
  return 'less than a minute ago';
}

/** What the kernel has done that is in no snapshot, before it is given up. */
function unsavedText(unsaved) {
  if (!unsaved) {
    return '';
  }
  const { since, cells, cell, computed } = unsaved;
  const done = cells ? `${cells} ${cells === 1 ? 'cell' : 'cells'}, run` : `${computed.toFixed(1)} s of computing`;
  const kept = `Not saved yet: ${done} since the last save, restore or start of the kernel (${ago(since)}). `;
  const running = cell ? `The running cell will be stopped: [${cell.number}] ${cell.begins} ` : '';
  const first = 'It is saved first if that takes a moment, and lost otherwise. ';
  return (cells || !cell ? kept : '') + running + first;
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.filter(child => child !== null && child !== ''));
  return made;
}

function button(text, label, onclick, more = {}) {
  const made = element('button', {
    type: 'button',
    textContent: text,
    onclick,
    ...more
  });
  made.setAttribute('aria-label', label);
  made.dataset.key = label;
  return made;
}

function render({ model, el }) {
  const view = Math.random().toString(36).slice(2);
  /** The snapshot that a question is asked about, and which question. */
  let asking = null;
  /** Where it is answered, where that stays whatever else changes: somebody may be writing there. */
  let answering = null;
  /** Whether what is under way is to be cancelled. */
  let cancelling = false;
  let number = 0;
  let timer = 0;
  let drawn = '';
  /** What the lists were last drawn from: what has not changed stays, since somebody may be pressing a button of it. */
  let listed = '';

  const state = () => model.get('state');
  /** Send a message; a front end that knows that the kernel is gone does not take it. */
  const tell = (message, otherwise = () => undefined) => {
    try {
      model.send({ ...message, view });
    } catch {
      otherwise();
    }
  };
  const say = (what, args = {}) => {
    number++;
    window.clearTimeout(timer);
    const complain = () => {
      silent.hidden = false;
    };
    timer = window.setTimeout(complain, PATIENCE);
    tell({ do: what, args, number: `${view}-${number}` }, complain);
  };
  const act = (what, args) => {
    asking = null;
    say(what, args);
    draw();
  };

  const about = element('p', { className: 'gpuckpt-about' });
  const name = element('input', {
    required: true,
    pattern: '[A-Za-z0-9_][A-Za-z0-9._\\-]{0,99}',
    placeholder: 'Name'
  });
  name.setAttribute('aria-label', 'Name');
  name.title = 'Use letters, digits, . _ - (at most 100); start with a letter, digit or _.';
  const note = element('input', { placeholder: 'Note (optional)' });
  note.setAttribute('aria-label', 'Note (optional)');
  const save = element('button', {
    type: 'submit',
    textContent: 'Save',
    className: 'gpuckpt-accept'
  });
  const form = element('form', {}, name, note, save);
  // The keys that notebooks know would otherwise be taken from the fields.
  el.addEventListener('keydown', event => event.stopPropagation());
  form.addEventListener('submit', event => {
    event.preventDefault();
    const taken = (state().own ?? []).some(one => nameOf(one) === name.value);
    const args = {
      name: name.value,
      message: note.value.trim(),
      replace: taken
    };
    if (taken) {
      asking = { what: 'replace', id: '', args };
      answering = null;
      draw();
    } else {
      act('save', args);
    }
    name.value = note.value = '';
  });
  const status = element('div', { className: 'gpuckpt-status' });
  status.setAttribute('role', 'status');
  const error = element('div', { className: 'gpuckpt-error', hidden: true });
  error.setAttribute('role', 'alert');
  const silent = element(
    'p',
    { className: 'gpuckpt-error', hidden: true },
    'The kernel does not answer. While it is busy the panel waits; after a restart of the kernel run %gpuckpt panel again.'
  );
  silent.setAttribute('role', 'alert');
  const lists = element('div');
  const root = element('div', { className: 'gpuckpt-panel' }, about, form, status, error, silent, lists);
  root.setAttribute('role', 'region');
  root.setAttribute('aria-label', 'Kernel snapshots');
  el.append(root);

  function draw() {
    const { kernel, own = [], others = [], older = 0, operation = null, note: told = '', error: failed } = state();
    const looks = JSON.stringify([state(), asking]);
    if (looks === drawn) {
      return;
    }
    drawn = looks;
    const focused = root.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
    if (kernel) {
      // It may have another name by now.
      const parent = [...own, ...others].find(one => one.id === kernel.parent?.id) ?? kernel.parent;
      const place = parent ? `based on ${parent.label ?? parent.name}` : 'fresh kernel';
      const freed = kernel.freed ? ` · ${size(kernel.freed)} freed on GPUs` : '';
      about.textContent = `Kernel: ${kernel.state} · ${size(kernel.memory)} memory${freed} · ${place}`;
    }
    save.disabled = operation !== null;
    cancelling &&= operation !== null;
    drawStatus(operation, told);
    drawError(failed ?? null);
    const here = kernel?.parent?.id;
    const busy = operation !== null;
    const { cells, cell } = kernel?.unsaved ?? {};
    const looksOfLists = JSON.stringify([own, others, older, here, busy, asking, asking && [cells, cell]]);
    if (looksOfLists === listed) {
      return;
    }
    listed = looksOfLists;
    const sections = [section('This notebook', own, here, busy)];
    if (others.length) {
      const details = element('details', {
        open: lists.querySelector('details')?.open ?? own.length === 0
      });
      details.append(
        element('summary', {
          textContent: `Other notebooks (${others.length})`
        }),
        section('Other notebooks', others, here, busy)
      );
      sections.push(details);
    }
    if (older) {
      sections.push(element('p', {}, `${older} older ones: %gpuckpt list shows them all.`));
    }
    lists.replaceChildren(...sections);
    const again = focused && [...root.querySelectorAll('[data-key]')].find(node => node.dataset.key === focused);
    // Never what cannot be taken back: a key that was meant for something else would do it.
    const first = '.gpuckpt-question input, .gpuckpt-question button:not(.gpuckpt-accept)';
    (asking ? root.querySelector(first) : again)?.focus();
  }

  function drawStatus(operation, told) {
    if (asking?.what === 'replace') {
      const { args } = asking;
      answering ??= question(`${args.name} is taken. Replace it?`, 'Replace', () => act('save', args));
      if (!status.contains(answering)) {
        status.replaceChildren(answering);
      }
    } else if (operation) {
      const bar = element('progress', operation.percent === null ? {} : { max: 100, value: operation.percent });
      bar.setAttribute('aria-label', 'Progress');
      const words = element('span', { textContent: cancelling ? 'Cancelling…' : operation.text });
      const shown = status.querySelector('progress');
      if (shown) {
        shown.previousSibling.replaceWith(words);
        shown.replaceWith(bar);
        status.querySelector('button').disabled = cancelling;
      } else {
        status.replaceChildren(
          words,
          bar,
          button('Cancel', 'Cancel', () => {
            say('cancel');
            cancelling = true; // at once: the kernel may stand still
            drawStatus(operation, told);
          })
        );
      }
    } else {
      status.replaceChildren(element('span', { textContent: told }));
    }
  }

  function drawError(failed) {
    error.hidden = failed === null;
    if (failed !== null) {
      const lines = [failed.what, failed.why && `Why: ${failed.why}`, failed.then && `Next: ${failed.then}`];
      error.replaceChildren(...lines.filter(Boolean).map(text => element('p', { textContent: text })));
    }
  }

  function section(title, snapshots, here, busy) {
    if (snapshots.length === 0) {
      return element('p', {}, 'No snapshots of this notebook yet: give it a name above, and save.');
    }
    const body = element('tbody');
    for (const snapshot of snapshots) {
      body.append(row(snapshot, here, busy));
      if (asking?.id === snapshot.id) {
        body.append(element('tr', {}, element('td', { colSpan: 5 }, ask(snapshot))));
      }
    }
    const head = element(
      'tr',
      {},
      ...['Name', 'Saved', 'Size', 'GPU memory', 'Actions'].map(text => element('th', { scope: 'col' }, text))
    );
    const table = element('table', {}, element('thead', {}, head), body);
    table.setAttribute('aria-label', title);
    return table;
  }

  function row(snapshot, here, busy) {
    const { id, name: key, label: called, message, created, pinned, tags } = snapshot;
    const { job } = snapshot;
    const marks = [here === id ? 'here' : '', job ? `job ${job}` : '', pinned ? 'pinned' : '', ...tags].filter(Boolean);
    const disabled = busy;
    const wonder = what => () => {
      asking = { what, id };
      answering = null;
      if (what === 'restore') {
        say('look'); // what the kernel has done since it was last looked at
      }
      draw();
    };
    const row = element(
      'tr',
      {},
      element(
        'td',
        {},
        element('strong', { textContent: called }),
        ...marks.flatMap(text => [' ', element('em', { textContent: text })]),
        message ? element('div', { textContent: message }) : ''
      ),
      element('td', { title: created }, new Date(created).toLocaleString()),
      element('td', {}, size(snapshot.size)),
      element('td', {}, snapshot.gpu_memory ? size(snapshot.gpu_memory) : '–'),
      buttons(
        button('Restore', `Restore ${called}`, wonder('restore'), {
          disabled: disabled || Boolean(job),
          title: job ? `In a terminal: jupyter gpuckpt restore ${job} ${nameOf(snapshot)}` : ''
        }),
        button('Rename', `Rename ${called}`, wonder('rename'), { disabled }),
        button(
          pinned ? 'Unpin' : 'Pin',
          `${pinned ? 'Unpin' : 'Pin'} ${called}`,
          () => act('pin', { key, name: called, pinned: !pinned }),
          { disabled }
        ),
        button('Remove', `Remove ${called}`, wonder('remove'), {
          disabled: disabled || pinned,
          title: pinned ? 'It is pinned' : ''
        })
      )
    );
    row.dataset.snapshot = called;
    return row;
  }

  function buttons(...all) {
    return element('td', {}, element('div', { className: 'gpuckpt-buttons' }, ...all));
  }

  function ask(snapshot) {
    const { name: key, label: called, size: bytes, notebook } = snapshot;
    if (asking.what === 'restore') {
      const foreign = (state().others ?? []).some(one => one.id === snapshot.id);
      const whose = foreign ? `It is not this notebook’s: ${notebook || 'a kernel without a notebook'} saved it. ` : '';
      const back = 'Variables, threads and GPU memory go back to what they were.';
      const text = `Put the kernel back to ${called}? ${whose}${unsavedText(state().kernel?.unsaved)}${back}`;
      return question(text, 'Restore', () => act('restore', { key, name: called }));
    }
    if (asking.what === 'remove') {
      return question(`Remove ${called} (${size(bytes)}) for good?`, 'Remove', () => act('rm', { key, name: called }));
    }
    answering ??= renaming(key, called, nameOf(snapshot));
    return answering;
  }

  function renaming(key, called, value) {
    const wanted = element('input', { value, required: true, pattern: name.pattern, title: name.title });
    wanted.setAttribute('aria-label', `New name of ${called}`);
    const rename = () => wanted.reportValidity() && act('mv', { key, name: called, new: wanted.value });
    wanted.addEventListener('keydown', event => event.key === 'Enter' && rename());
    return question('', 'Rename', rename, wanted);
  }

  function question(text, accept, yes, field = '') {
    const box = element(
      'div',
      { className: 'gpuckpt-question' },
      text ? element('span', { textContent: text }) : '',
      field,
      button(accept, accept, yes, { className: 'gpuckpt-accept' }),
      button('Cancel', 'Never mind', () => {
        asking = null;
        draw();
      })
    );
    box.addEventListener('keydown', event => {
      if (event.key === 'Escape') {
        asking = null;
        draw();
      }
    });
    return box;
  }

  const changed = () => {
    window.clearTimeout(timer);
    silent.hidden = true;
    draw();
  };
  model.on('change:state', changed);
  // The kernel looks at the store for as long as somebody looks at the panel.
  let inView = false;
  let seen = false;
  const see = () => {
    const now = inView && !document.hidden;
    if (now !== seen) {
      seen = now;
      tell({ do: 'see', seen });
    }
  };
  const observer = new IntersectionObserver(entries => {
    inView = entries[entries.length - 1].isIntersecting;
    see();
  });
  observer.observe(root);
  document.addEventListener('visibilitychange', see);
  draw();
  return () => {
    model.off('change:state', changed);
    observer.disconnect();
    document.removeEventListener('visibilitychange', see);
    window.clearTimeout(timer);
    inView = false;
    see();
  };
}

export default { render };
