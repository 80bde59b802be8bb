/** Figures and moments as people write them. */

const UNITS = ['B', 'kB', 'MB', 'GB', 'TB'];

/** Write a number of bytes, with two or three digits that count. */
export function size(bytes: number): string {
  let value = bytes;
  let unit = 0;
  while (value >= 1000 && unit < UNITS.length - 1) {
    value /= 1000;
    unit++;
  }
  const digits = unit === 0 || value >= 100 ? 0 : 1;
  return `${value.toFixed(digits)} ${UNITS[unit] ?? ''}`;
}

const STEPS: [Intl.RelativeTimeFormatUnit, number][] = [
  ['day', 86400],
  ['hour', 3600],
  ['minute', 60]
];

/** Write how long ago something was, in the person's language; from a month on, the day. */
export function ago(created: string, now: Date, locale?: string): string {
  const then = new Date(created);
  const seconds = Math.max(0, (now.getTime() - then.getTime()) / 1000);
  if (seconds >= 30 * 86400) {
    return then.toLocaleDateString(locale, { year: 'numeric', month: 'short', day: 'numeric' });
  }
  const relative = new Intl.RelativeTimeFormat(locale, { numeric: 'auto' });
  for (const [unit, length] of STEPS) {
    if (seconds >= length) {
      return relative.format(-Math.floor(seconds / length), unit);
    }
  }
  // In a sentence a bare "now" would be read as what is done now.
  return relative.resolvedOptions().locale.startsWith('en') ? 'just now' : relative.format(0, 'second');
}

/** Write a duration in seconds, with the digits that count. */
export function seconds(span: number): string {
  return `${span.toFixed(span < 10 ? 1 : 0)} s`;
}

/** Write a moment in full, in the person's language and time zone. */
export function moment(created: string, locale?: string): string {
  return new Date(created).toLocaleString(locale);
}

/** Return the last part of a path. */
export function basename(path: string): string {
  return path.slice(path.lastIndexOf('/') + 1);
}
