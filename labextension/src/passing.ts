/** Notifications that go by themselves. */

import { Notification } from '@jupyterlab/apputils';

/** For how long one stays, in milliseconds; twice as long where there is something to do about it. */
const STAYS = 5000;
/** How often it is looked for where JupyterLab draws it, in milliseconds, and how many times at most. */
const LOOKED_FOR = 1000;
const LOOKS = 120;

/** Tell of something, and return the notification's id; JupyterLab lists it when it has gone. */
export function tellInPassing(message: string, type: 'info' | 'success', actions: Notification.IAction[] = []): string {
  const autoClose = actions.length > 0 ? 2 * STAYS : STAYS;
  const id = Notification.emit(message, type, { autoClose, actions });
  let looks = 0;
  const looking = window.setInterval(() => {
    const drawn = document.getElementById(id);
    if (drawn !== null || ++looks === LOOKS) {
      window.clearInterval(looking);
    }
    if (drawn !== null) {
      startClock(drawn);
    }
  }, LOOKED_FOR);
  return id;
}

/**
 * See to it that a notification's time runs.
 *
 * It begins to when the notification has slid in. A page that has much to do begins to listen for that too late, and
 * then it would stay for ever. The time goes on, too, when the mouse leaves the notification.
 */
function startClock(drawn: HTMLElement): void {
  if (document.hasFocus() && !drawn.matches(':hover')) {
    drawn.dispatchEvent(new MouseEvent('mouseout', { bubbles: true }));
  }
}
